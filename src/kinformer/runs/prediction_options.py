"""What predicting and embedding are asked for. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kinformer.runs.options import Machine
from kinformer.runtime.errors import require, require_seed
from kinformer.tasks.predictions import PredictionSettings


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PredictionSettings, Machine):
    """The options of predicting with a trained run."""

    set: Mapping[str, Any] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    seed: int = 0
    """Decides everything random, such as the hashes of a member that has some."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task's own, by name."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        PredictionSettings.__post_init__(self)
        Machine.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(Machine):
    """The options of making vectors of texts with a trained run."""

    set: Mapping[str, Any] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    seed: int = 0
    """Decides everything random, such as the hashes of a member that has some."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """What the vector of a text is: the mean over its tokens, or the vector of the first or of the last one."""
    text_field: str | None = None
    """The column or field with the text, where it is not called text or sentence."""
    format: Literal["lines", "tsv", "csv", "jsonl"] | None = None
    """How the rows of the input are written. If not given, by the file's ending, and lines on standard input."""
    batch_size: int = 32
    """Texts that are computed at a time; bounds the memory, does not change the result."""
    max_items: int | None = None
    """Embed the first N texts only."""
    quiet: bool = False
    """Tell nothing but the result: no progress, no notes."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_items"):
            require(name, getattr(self, name), 1)
        require_seed(self.seed)
        super().__post_init__()
