"""The parts of a task's record: which models it takes, which data it needs, what evaluating and predicting read, and
what generating means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that can be trained for a task.

    They have one of the ``protocols`` (``core.model``; the usual one first) and one of the kinds of ``inputs``, such as
    tokens; None stands for any. With ``from_tokens``, ``Task.fit`` gives models of tokens such an input.
    """

    protocols: tuple[type, ...]
    inputs: tuple[str, ...] | None = None
    from_tokens: bool = False

    def fit(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` has one of the protocols and inputs, as it is."""
        return config.protocol in self.protocols and (self.inputs is None or config.input.kind in self.inputs)

    def take(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` has them, or the task gives it such an input."""
        reads_ids = self.from_tokens and config.input.kind == "tokens"
        return self.fit(config) or (reads_ids and config.protocol in self.protocols)


@dataclass(frozen=True, kw_only=True)
class DataNeeds:
    """The data that a task learns from.

    ``default`` is what it learns from where none is named; None means that some must be, and ``missing`` then says in
    one sentence what to give. A tokenizer makes ids of it where ``tokenized``. With ``columns`` the task itself reads
    the column of its tables that `text_field` names. In ``running_text`` a row may be any
    part, so that ``minutes`` alone decide sizes and recipe. ``refused`` are general options of training that mean
    nothing to the task, each with the reason and the remedy.
    """

    default: str | None = None
    missing: str = "the task needs data; give `data` PATH."
    tokenized: bool = False
    columns: bool = False
    running_text: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)


NOTHING_DRAWN = "nothing is drawn at random in an evaluation of this task; leave it out."
"""Why an evaluation refuses a seed."""


@dataclass(frozen=True, kw_only=True)
class EvaluationNeeds:
    """What evaluating reads: all general options (``tasks.evaluation.EvaluationSettings``) but the ``refused``, each of
    which has the reason and the remedy."""

    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What predicting takes: the general options that it ``reads``, of those in ``PREDICTING``.

    The others are refused. ``refusal`` says of a task that predicts nothing why, as a whole clause; None where it does.
    """

    reads: tuple[str, ...] = ()
    refusal: str | None = None


PREDICTING = ("top_k", "text_field", "label_field", "format", "batch_size")
"""The general options of predicting that say how items are read and what is said of each."""
OF_TEXTS = ("text_field", "label_field", "format", "batch_size")
"""Those that a task reads whose items are texts."""


DRAWING = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "samples", "chunk",
    "draft", "draft_length",
)  # fmt: skip
"""The general options of generating that say what is drawn, and how."""


class GenerationSettings(Protocol):
    """The general options of generating as a task gets them, where seed and temperature were decided; ``task_options``
    are those that only the task has."""

    @property
    def max_new_tokens(self) -> int | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def samples(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def draft_length(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def quiet(self) -> bool: ...
    @property
    def task_options(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What generating takes: a prompt of ``text``, of ``lines``, one by one as they come, or None.

    ``temperature`` is the usual one. ``reads`` are the options of drawing, of those in ``DRAWING``, that it reads; the
    others are refused, and ``unread`` says why: "a key has one answer, the most probable". ``refusal`` says of a task
    that generates nothing why, as a whole clause: "it reads whole texts; give a run of a causal member"; None where it
    generates.
    """

    prompt: Literal["text", "lines"] | None = "text"
    temperature: float = 0.8
    reads: tuple[str, ...] = DRAWING
    unread: str = ""
    refusal: str | None = None
