"""The best weights of a run: ``model.safetensors``, whose metadata has their step and their metrics.

A run that was never validated has its newest weights there, without metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.runtime.files import load_tensors, reading, save_tensors
from kinformer.runtime.parsing import parse_json

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.training.metric import Metric

WEIGHTS = "model.safetensors"
_METRICS, _STEP = "figures", "step"


def best_of(folder: Path) -> tuple[dict[str, float], int] | None:
    """Return the metrics of the best validation in a run folder, the deciding one
    first, and its step; None if there is none."""
    if not (folder / WEIGHTS).exists():
        return None
    metadata = load_tensors(folder / WEIGHTS)[1]
    with reading(folder / WEIGHTS):
        return (dict(parse_json(metadata[_METRICS])), int(metadata[_STEP])) if _METRICS in metadata else None


class Best:
    """The best validation so far, and the file of its weights.

    The first of ``metrics_in_order`` decides; the next one breaks a tie."""

    def __init__(self, folder: Path, metrics_in_order: Sequence[Metric]) -> None:
        self.folder, self.metrics_in_order = folder, metrics_in_order
        self.metrics: dict[str, float] | None = None
        self.step: int | None = None
        if (best := best_of(folder)) is not None:
            self.metrics, self.step = best

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics are better than the best so far."""
        best = self.metrics
        if best is None:
            return isfinite(metrics[self.metrics_in_order[0].name])
        deciding = next((metric for metric in self.metrics_in_order if metrics[metric.name] != best[metric.name]), None)
        return deciding is not None and deciding.better(metrics[deciding.name], best[deciding.name])

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """Record ``metrics`` of step ``step`` as the best so far."""
        self.metrics, self.step = dict(metrics), step

    def write(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Write the weights of ``step`` to the file."""
        noted = {} if self.metrics is None else {_METRICS: json.dumps(list(self.metrics.items()))}
        save_tensors(self.folder / WEIGHTS, weights, {_STEP: str(step), **noted})
