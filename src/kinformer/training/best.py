"""The best weights of a run: ``model.safetensors``, whose metadata has their step and their metrics, or, where several
processes hold parts of the weights, a checkpoint of shards in ``best/``. A run has the later one.

A run that was never validated has its newest weights there, without metrics.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.runtime.files import load_tensors, reading, save_tensors, sync_folder
from kinformer.runtime.parsing import parse_json
from kinformer.training.checkpoint import Checkpoint, Checkpoints

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.training.distributed import Group
    from kinformer.training.metric import Metric
    from kinformer.training.shards import Part

WEIGHTS, SHARDED = "model.safetensors", "best"
_METRICS, _STEP = "figures", "step"
_MODEL = frozenset({"model"})


def best_of(folder: Path) -> tuple[dict[str, float], int] | None:
    """Return the metrics of the best validation in a run folder, the deciding one
    first, and its step; None if there is none."""
    place = place_of_best(folder)
    if not place.exists():
        return None
    if place.name == WEIGHTS:
        metadata = load_tensors(place)[1]
        with reading(place):
            return (dict(parse_json(metadata[_METRICS])), int(metadata[_STEP])) if _METRICS in metadata else None
    checkpoint = _sharded(place)
    with reading(place):
        metrics = checkpoint.numbers.get(_METRICS)
        return None if metrics is None else ({str(name): float(value) for name, value in metrics}, checkpoint.step)


def place_of_best(folder: Path) -> Path:
    """Return the file of the best weights in a run folder, whether it is there or not, or the folder of their shards.

    Both are there only where a process died between writing one and removing the other: the later one counts.
    """
    file, steps = folder / WEIGHTS, Checkpoints(folder / SHARDED, 1).steps()
    if not steps:
        return file
    shards = Checkpoints(folder / SHARDED, 1).path(steps[-1])
    if not file.is_file():
        return shards
    with reading(file):
        return file if int(load_tensors(file)[1].get(_STEP, 0)) > steps[-1] else shards


def best_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the best weights in a run folder, whole, and the metadata of their file (of shards none)."""
    place = place_of_best(folder)
    if place.name == WEIGHTS:
        return load_tensors(place)
    shards = _sharded(place).shards
    assert shards is not None
    shards.verify()
    return shards.whole("model"), {}


def _sharded(place: Path) -> Checkpoint:
    step = int(place.name.rpartition("-")[2])
    return Checkpoints(place.parent, 1).read(step, required=_MODEL, verified=False)


class Best:
    """The best validation so far, and the file of its weights.

    The first of ``metrics_in_order`` decides; the next one breaks a tie."""

    def __init__(self, folder: Path, metrics_in_order: Sequence[Metric]) -> None:
        self.folder, self.metrics_in_order = folder, metrics_in_order
        self.metrics: dict[str, float] | None = None
        self.step: int | None = None
        if (best := best_of(folder)) is not None:
            self.metrics, self.step = best

    def forget(self, step: int) -> None:
        """Discard the best validation where it is of ``step`` or before, when the model was another one."""
        if step and self.step is not None and self.step <= step:
            self.metrics = self.step = None

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics are better than the best so far."""
        best = self.metrics
        if best is None:
            return isfinite(metrics[self.metrics_in_order[0].name])
        deciding = next((metric for metric in self.metrics_in_order if metrics[metric.name] != best[metric.name]), None)
        return deciding is not None and deciding.better(metrics[deciding.name], best[deciding.name])

    def out_of_patience(self, step: int, patience: int, validate_every: int) -> bool:
        """Return whether, at ``step``, as many validations as the ``patience`` (0: never) have not beaten the best."""
        return bool(patience) and self.step is not None and step - self.step >= patience * validate_every

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """Record ``metrics`` of step ``step`` as the best so far."""
        self.metrics, self.step = dict(metrics), step

    def write(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Write the weights of ``step`` to the file."""
        noted = {} if self.metrics is None else {_METRICS: json.dumps(list(self.metrics.items()))}
        save_tensors(self.folder / WEIGHTS, weights, {_STEP: str(step), **noted})
        shutil.rmtree(self.folder / SHARDED, ignore_errors=True)

    def write_sharded(self, part: Part, step: int, group: Group) -> None:
        """Write the weights of ``step``, called ``"model/name"``, of which each process of ``group`` has a ``part``;
        all must call together."""
        noted = {} if self.metrics is None else {_METRICS: list(self.metrics.items())}
        Checkpoints(self.folder / SHARDED, 1).save_sharded(Checkpoint(step, {}, noted), part, group)
        group.on_first(self._remove_file)

    def _remove_file(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / WEIGHTS).unlink()
            sync_folder(self.folder)
