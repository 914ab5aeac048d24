"""How runs of any task are evaluated, and what an evaluation reports: metrics, facts for JSON, text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kinformer.runtime.errors import KinformerError, require
from kinformer.training.metric import Metric


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How runs of any task are measured."""

    data: str | None = None
    """Data to measure on: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "test"
    """Which part of the data: train, validation or test."""
    max_bytes: int | None = None
    """Measure on the first N bytes only."""
    chunk: int = 2048
    """Tokens computed at a time; bounds the memory, does not change the result."""
    seed: int = 0
    """Decides everything random."""

    def __post_init__(self) -> None:
        require("--max-bytes", self.max_bytes, 2)
        require("--chunk", self.chunk, 1)
        require("--seed", self.seed, 0)

    def refuse_data(self, why: str) -> None:
        """For a task that makes its own rows."""
        if self.data is not None or self.max_bytes is not None:
            given = f"--data {self.data}" if self.data is not None else f"--max-bytes {self.max_bytes}"
            raise KinformerError(f"{given}: {why}")


class TextTable(NamedTuple):
    """A table as it is printed; the columns in ``numeric`` are aligned to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numeric: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a run is. ``metrics``: those of ``units``, which say what they are and whether less is better;
    ``baselines``: what simple rules have of the deciding figure; ``data``: the identity of what was measured on;
    ``facts``: all of it and more, as JSON; ``text``: the same for people."""

    run: str
    member: str
    metrics: Mapping[str, float]
    units: tuple[Metric, ...]
    data: Mapping[str, Any]
    baselines: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    text: tuple[str | TextTable, ...] = field(default=(), repr=False)

    @property
    def figures(self) -> Mapping[str, float]:
        """The same as ``metrics``."""
        return self.metrics


@dataclass(frozen=True)
class EvaluationReport:
    """Several evaluations, and what is reported of all of them: ``together`` as text, ``facts`` as JSON."""

    evaluations: Sequence[Evaluation]
    together: Sequence[str | TextTable] = ()
    own_facts: Mapping[str, Any] | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        """For JSON."""
        if self.own_facts is not None:
            return self.own_facts
        facts = [evaluation.facts for evaluation in self.evaluations]
        return facts[0] if len(facts) == 1 else {"runs": facts}

    @property
    def text(self) -> list[str | TextTable]:
        """For people."""
        return [*(block for evaluation in self.evaluations for block in evaluation.text), *self.together]
