"""What a trainer writes into its run's folder and reads from it: checkpoints, and the best weights.

The first process writes them whole; where the weights are sharded over processes, all write their parts. With
``async_saves`` a thread beside training writes copies made between two steps: the same files, only later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from math import isfinite
from pathlib import Path

from torch import Tensor

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.lock import is_here
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.sharding import is_sharded
from kinformer.training.best import SHARDED, WEIGHTS, Best
from kinformer.training.checkpoint import CHECKPOINTS, Checkpoint, Checkpoints
from kinformer.training.distributed import Group
from kinformer.training.layouts import UNDIVIDED
from kinformer.training.metric import Metric
from kinformer.training.optimiser import finite, gather
from kinformer.training.saves import Saves
from kinformer.training.settings import Settings
from kinformer.training.shards import Part, part_of

Tensors = Mapping[str, Tensor]


class Storage:
    """The checkpoints and the best weights in ``folder``, by the first of ``metrics``, of the processes of ``group``.

    All processes call every method together.
    """

    def __init__(self, folder: Path, settings: Settings, metrics: Sequence[Metric], group: Group) -> None:
        self.folder, self.settings, self.group = folder, settings, group
        self.layouts = UNDIVIDED
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, settings.keep, settings.average)
        self.best = Best(folder, metrics)
        self.home = folder.stat() if folder.exists() else None
        self.saves = Saves(settings.async_saves)
        self.writers = group.with_new_channel() if settings.async_saves else group

    def save(self, step: int, groups: Mapping[str, Tensors], files: Mapping[str, Tensors], numbers: JsonObject) -> None:
        """Write a checkpoint of ``groups``, sharded as the weights are, and of ``files``, whole on the first process.

        A weight that is not finite is an error, and nothing is written. Where there are no best weights yet, these are.
        """
        self.saves.begin(step)
        if not self.group.sharded:
            gathered = {name: gather(tensors.items(), self.group.first) for name, tensors in groups.items()}
            whole = {name: tensors for name, tensors in {**gathered, **files}.items() if tensors or name == "optimizer"}
            self.group.on_first(lambda: self._require_finite_weights(step, whole["model"]))
            if self.best.step is None:
                self._add_best(step, {**gathered["model"], **gathered.get("average", {})})
            checkpoint = Checkpoint(step, whole, numbers)
            self.saves.add(lambda: self.writers.on_first(lambda: self.checkpoints.save(checkpoint)))
            return
        rows = {name: self.layouts.in_rows(tensors) for name, tensors in groups.items() if tensors}
        self.group.on_all(lambda: self._require_finite_weights(step, rows["model"]))
        if self.best.step is None:
            self._add_best_part(step, {**rows["model"], **rows.get("average", {})})
        named = {f"{group}/{name}": item for group, tensors in rows.items() for name, item in tensors.items()}
        parts, head = self._part(named), Checkpoint(step, {name: item for name, item in files.items() if item}, numbers)
        self.saves.add(lambda: self.checkpoints.save_sharded(head, parts, self.writers))

    def save_best(self, step: int, weights: Tensors) -> None:
        """Write ``weights``, sharded as the model's are, as the best."""
        self.saves.begin(step)
        if self.group.sharded:
            self.group.on_all(self._require_home)
            self._add_best_part(step, self.layouts.in_rows(weights))
        else:
            self._add_best(step, gather(weights.items(), self.group.first))

    def require_finite(self, step: int, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Raise where a loss, or a norm of a gradient, is not finite; the first ones are of ``step``."""
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=step):
            if not (isfinite(loss) and isfinite(norm)):
                raise self.diverged(f"the loss is {loss:g} and the gradient's norm {norm:g} at step {number}")

    def diverged(self, what: str) -> KinformerError:
        """Return the error that ends a run whose numbers are no longer finite: ``what`` says where."""
        with suppress(KinformerError):
            self.saves.wait()
        steps = self.checkpoints.steps()
        remedy = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        return KinformerError(
            f"training diverged: {what}; {remedy}; start again with a lower `lr` (now {self.settings.lr:g}), "
            "a longer `warmup` or a smaller `clip`."
        )

    def _add_best(self, step: int, whole: Tensors) -> None:
        best = copy(self.best)  # the metrics of now

        def write() -> None:
            with self.checkpoints.reporting_failure(self.folder / WEIGHTS):
                best.write(whole, step)

        self.saves.add(lambda: self.writers.on_first(write))

    def _add_best_part(self, step: int, rows: Tensors) -> None:
        best, part = copy(self.best), self._part({f"model/{name}": tensor for name, tensor in rows.items()})

        def write() -> None:
            with self.checkpoints.reporting_failure(self.folder / SHARDED):
                best.write_sharded(part, step, self.writers)

        self.saves.add(write)

    def _part(self, tensors: Tensors) -> Part:
        part = part_of(tensors, self.group)
        if not self.saves.in_thread:
            return part
        # What does not lie in rows was put into rows, into memory of its own.
        return part.staged([name for name, item in tensors.items() if is_sharded(item)] if self.layouts.mesh else ())

    def _require_finite_weights(self, step: int, weights: Tensors) -> None:
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
