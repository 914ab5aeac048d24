"""What a trainer writes into its run's folder and reads from it: checkpoints, and the best weights.

The first process writes them whole; where the weights are sharded over processes, all write their parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.lock import is_here
from kinformer.training.best import SHARDED, WEIGHTS, Best
from kinformer.training.checkpoint import CHECKPOINTS, Checkpoint, Checkpoints
from kinformer.training.distributed import Group
from kinformer.training.layouts import AS_THEY_LIE
from kinformer.training.metric import Metric
from kinformer.training.optimiser import finite, gather
from kinformer.training.settings import Settings

Tensors = Mapping[str, Tensor]


class Storage:
    """The checkpoints and the best weights in ``folder``, by the first of ``metrics``, of the processes of ``group``.

    All processes call every method together.
    """

    def __init__(self, folder: Path, settings: Settings, metrics: Sequence[Metric], group: Group) -> None:
        self.folder, self.settings, self.group = folder, settings, group
        self.layouts = AS_THEY_LIE
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, settings.keep, settings.average)
        self.best = Best(folder, metrics)
        self.home = folder.stat() if folder.exists() else None

    def save(self, step: int, groups: Mapping[str, Tensors], files: Mapping[str, Tensors], numbers: Any) -> None:
        """Write a checkpoint of ``groups``, sharded as the weights are, and of ``files``, whole on the first process.

        A weight that is not finite is an error, and nothing is written. Where there are no best weights yet, these are.
        """
        if self.group.sharded:
            groups = {name: self.layouts.in_rows(tensors) for name, tensors in groups.items() if tensors}
            files = {name: tensors for name, tensors in files.items() if tensors}
            self.group.on_all(lambda: self._require_good(step, groups["model"]))
            if self.best.step is None:
                self._write_best(step, {**groups["model"], **groups.get("average", {})})
            named = {f"{group}/{name}": item for group, tensors in groups.items() for name, item in tensors.items()}
            self.checkpoints.save_sharded(Checkpoint(step, files, numbers), named, self.group)
            return
        gathered = {name: gather(tensors.items(), self.group.first) for name, tensors in groups.items()}
        whole = {name: tensors for name, tensors in {**gathered, **files}.items() if tensors or name == "optimizer"}
        self.group.on_first(lambda: self._write(Checkpoint(step, whole, numbers)))

    def save_best(self, step: int, weights: Tensors) -> None:
        """Write ``weights``, sharded as the model's are, as the best."""
        if self.group.sharded:
            self.group.on_all(self._require_home)
            self._write_best(step, self.layouts.in_rows(weights))
        else:
            whole = gather(weights.items(), self.group.first)
            self.group.on_first(lambda: self._write_best(step, whole))

    def diverged(self, what: str) -> KinformerError:
        """Return the error that ends a run whose numbers are no longer finite: ``what`` says where."""
        steps = self.checkpoints.steps()
        remedy = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        return KinformerError(
            f"training diverged: {what}; {remedy}; start again with a lower `lr` (now {self.settings.lr:g}), "
            "a longer `warmup` or a smaller `clip`."
        )

    def _write(self, checkpoint: Checkpoint) -> None:
        self._require_good(checkpoint.step, checkpoint.files["model"])
        if self.best.step is None:
            self._write_best(checkpoint.step, {**checkpoint.files["model"], **checkpoint.files.get("average", {})})
        self.checkpoints.save(checkpoint)

    def _write_best(self, step: int, weights: Tensors) -> None:
        with self.checkpoints.surviving(self.folder / (SHARDED if self.group.sharded else WEIGHTS)):
            if self.group.sharded:
                self.best.write_sharded(weights, step, self.group)
            else:
                self.best.write(weights, step)

    def _require_good(self, step: int, weights: Tensors) -> None:
        self._require_home()
        if not finite(weights):
            raise self.diverged(f"a weight is no longer finite after step {step}")

    def _require_home(self) -> None:
        """Raise where the folder was moved meanwhile, rather than begin a second one with half a run."""
        if self.home is not None and not is_here(self.folder, self.home):
            raise KinformerError(
                f"{self.folder}: was moved or removed while it was trained in, so nothing after its last checkpoint is "
                "kept; go on where it is now with `resume`."
            )
