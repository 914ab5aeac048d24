"""The options of predicting and embedding. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kinformer.runs.options import Machine
from kinformer.runtime.errors import require_seed
from kinformer.tasks.predictions import EmbeddingSettings, PredictionSettings


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PredictionSettings, Machine):
    """The options of predicting with a trained run."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    seed: int = 0
    """Decides everything random, such as the hashes of a member that has some."""
    task_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the task's own, by name."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        PredictionSettings.__post_init__(self)
        Machine.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EmbeddingSettings, Machine):
    """The options of making vectors of texts, images or sounds with a trained run."""

    set: Mapping[str, object] = field(default_factory=dict)
    """A change that leaves the weights as they are, as in `set` layers.*.mixer.position.scaling=yarn."""
    seed: int = 0
    """Decides everything random, such as the hashes of a member that has some."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        EmbeddingSettings.__post_init__(self)
        Machine.__post_init__(self)
