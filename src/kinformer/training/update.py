"""One update: rows in, forward and backward in parts, gradients clipped, weights moved."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.learning import OnlineLearner, Regularized, Resampled, due_for_resampling
from kinformer.core.model import modules_of
from kinformer.data.permutation import mix
from kinformer.training.batch import Batch, map_fields, rows_of, take_rows
from kinformer.training.carried import Carried
from kinformer.training.data_module import DataModule
from kinformer.training.distributed import Group
from kinformer.training.engines import average_gradients
from kinformer.training.objective import PREDICTED, require_metrics
from kinformer.training.optimiser import Optimiser
from kinformer.training.pace import seconds_per_step
from kinformer.training.settings import Settings

_FEATURES = 0x46454154
"""Sets the seeds of random features apart from those of masks."""


class UpdateResult(NamedTuple):
    """The result of an update: ``loss`` and ``norm`` of the gradient, scalars; the means of the data's ``metrics`` over
    predictions; the ``size`` of all processes' rows."""

    loss: Tensor
    norm: Tensor
    metrics: Tensor
    size: int


class Updater:
    """The maker of updates to the weights behind ``engine``, an ``ObjectiveModule`` wrapped by ``training.engines``."""

    def __init__(
        self,
        engine: nn.Module,
        optimiser: Optimiser,
        carried: Carried,
        data: DataModule,
        settings: Settings,
        group: Group,
    ) -> None:
        self.engine, self.optimiser, self.carried, self.data = engine, optimiser, carried, data
        self.settings, self.group = settings, group
        settings.rows(group.replicas)  # refuses those that cannot be shared
        self.resampled, self.online = modules_of(engine, Resampled), modules_of(engine, OnlineLearner)
        self.regularized = modules_of(engine, Regularized)

    def forget(self) -> None:
        """Reset the optimiser's state and the carried states, as before the first step."""
        self.optimiser.forget()
        self.carried.clear()

    def seconds_per_step(self, limit: float) -> float:
        """Return the seconds of an update, measured for about ``limit`` seconds by updates with learning rate 0 whose
        effects are then undone."""
        buffers = [(buffer, buffer.clone()) for buffer in self.engine.buffers()]
        seconds = seconds_per_step(
            lambda step: float(self(step, 0.0, 0.0).loss), limit, lambda: self.group.largest(time.monotonic())[0]
        )
        self.forget()
        for buffer, before in buffers:
            buffer.copy_(before)
        return seconds

    def __call__(self, step: int, rate: float, progress: float) -> UpdateResult:
        """Make update number ``step``; return the results of this process's rows, still on the device."""
        self._resample(step)
        self._seed_masks(step)
        batch = self._batch(step)
        parts = self.settings.accumulate
        costs = []
        for part in range(parts):
            with self.group.exchange(self.engine, part == parts - 1):
                costs.append(self._part(part, batch, progress))
        average_gradients(self.engine)
        norm = self.optimiser.clip(self.settings.clip)
        self.optimiser.step(rate)
        for module in self.online:
            module.learn(self.group.sum)
        for bounded in self.regularized:
            bounded.constrain()
        loss, *metrics = torch.stack(costs).mean(dim=0)
        return UpdateResult(loss, norm.detach(), torch.stack(metrics), batch.size * self.group.copies)

    def _part(self, part: int, batch: Batch, progress: float) -> Tensor:
        size = rows_of(batch) // self.settings.accumulate
        rows = take_rows(batch, slice(part * size, (part + 1) * size))
        loss, metrics, state = self.engine(rows, self.carried.states[part], progress)
        if self.data.carries:
            self.carried.put(part, state)
        del state  # before the backward: it may be as large as the activations
        (loss / self.settings.accumulate).backward()
        require_metrics(metrics, self.data.sums)
        means = [metrics[name] / metrics[PREDICTED].clamp_min(1) for name in self.data.sums]
        return torch.stack([loss.detach(), *means])

    def _resample(self, step: int) -> None:
        """Resample random features, which all processes share; states made with the old ones are dropped."""
        for number, module in due_for_resampling(self.resampled, step):
            module.draw(int(mix(self.settings.seed, _FEATURES, number, step)[0] >> np.uint64(1)))
            self.carried.clear()

    def _seed_masks(self, step: int) -> None:
        """Seed the step's random masks, which depend on no earlier step, so that a resumed run draws the same."""
        seed = int(mix(self.settings.seed, step, self.group.rank // self.group.tensor)[0])
        torch.default_generator.manual_seed(seed)
        if self.group.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _batch(self, step: int) -> Batch:
        batch = self.data.batch(step, self.group.replica, self.group.replicas)
        return map_fields(self.group.stretch_of(batch), self._place)

    def _place(self, tensor: Tensor) -> Tensor:
        if self.group.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.group.device, non_blocking=True)


class Window:
    """The updates since the last reading, whose results stay on the device until the next.

    ``speed``: tokens per second between the last two readings; ``overall``: over all of them, that is ``tokens`` in
    ``seconds``.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.updates: list[UpdateResult] = []
        self.speed = self.overall = self.seconds = 0.0
        self.tokens = 0
        self.restart()

    def add(self, done: UpdateResult) -> None:
        """Record the result of one step."""
        self.updates.append(done)

    def read(self) -> tuple[list[float], list[float], list[list[float]]]:
        """Return the losses, norms and metrics (means over the processes) of the steps since the last reading; this
        waits for the device."""
        if not self.updates:
            return [], [], []
        ours = torch.stack([torch.cat([done.loss[None], done.metrics]) for done in self.updates])
        losses, *metrics = self.group.mean(ours).T.tolist()
        norms = torch.stack([done.norm for done in self.updates])
        if self.group.strategy == "diloco":  # each process has gradients of its own
            norms = self.group.mean(norms)
        seconds, tokens = time.monotonic() - self._mark, sum(done.size for done in self.updates)
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        self.speed, self.overall = tokens / seconds, self.tokens / self.seconds
        self.updates = []
        self.restart()
        return losses, norms.tolist(), metrics

    def restart(self) -> None:
        """Measure time from now on, after something other than a step."""
        self._mark = time.monotonic()
