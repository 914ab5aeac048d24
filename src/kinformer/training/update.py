"""One update: rows in, forward and backward in parts, gradients clipped, weights moved."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.data.permutation import mix
from kinformer.training.batch import Batch
from kinformer.training.carried import Carried
from kinformer.training.distributed import Group
from kinformer.training.feeds import Feed
from kinformer.training.optimiser import Optimiser
from kinformer.training.settings import Settings


class Done(NamedTuple):
    """Of an update: ``loss`` and ``norm`` of the gradient, scalars; ``told``, nats of a prediction on average (the loss
    without what else was minimised) and, where it is counted, the share of correct ones; all processes' ``tokens``."""

    loss: Tensor
    norm: Tensor
    told: Tensor
    tokens: int


class Updater:
    """Makes update number ``step`` of the weights behind ``engine``, a wrapped ``Step``."""

    def __init__(
        self,
        engine: nn.Module,
        optimiser: Optimiser,
        carried: Carried,
        feed: Feed,
        settings: Settings,
        group: Group,
    ) -> None:
        self.engine, self.optimiser, self.carried, self.feed = engine, optimiser, carried, feed
        self.settings, self.group = settings, group
        self.rows = settings.rows(group.world)

    def forget(self) -> None:
        """Let go of the optimiser's state and the carried states, as before the first step."""
        self.optimiser.forget()
        self.carried.clear()

    def __call__(self, step: int, rate: float, progress: float) -> Done:
        """What came of this process's rows, still on the device."""
        self._seed_masks(step)
        batch = self._batch(step)
        parts = self.settings.accumulate
        costs = []
        for part in range(parts):
            with self.group.exchange(self.engine, part == parts - 1):
                costs.append(self._part(part, batch, progress))
        norm = self.optimiser.clip(self.settings.clip)
        self.optimiser.step(rate)
        loss, *told = torch.stack(costs).mean(dim=0)
        return Done(loss, norm.detach(), torch.stack(told), batch.size * self.group.world)

    def _part(self, part: int, batch: Batch, progress: float) -> Tensor:
        rows = batch.rows(slice(part * self.rows, (part + 1) * self.rows))
        loss, metrics, state = self.engine(rows, self.carried.states[part], progress)
        if self.settings.segments:
            self.carried.put(part, state)
        del state  # before the backward: it may be as large as the activations
        (loss / self.settings.accumulate).backward()
        counted = [metrics[name] for name in ("nats", "correct") if name in metrics]
        shares = [each / metrics["predicted"].clamp_min(1) for each in counted]
        return torch.stack([loss.detach(), *shares])

    def _seed_masks(self, step: int) -> None:
        """Begin the step's random masks: they depend on nothing before, so a resumed run draws the same."""
        seed = int(mix(self.settings.seed, step, self.group.rank)[0])
        torch.default_generator.manual_seed(seed)
        if self.group.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _batch(self, step: int) -> Batch:
        return self.feed.batch(step, self.group.rank, self.group.world).map(self._place)

    def _place(self, tensor: Tensor) -> Tensor:
        if self.group.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.group.device, non_blocking=True)


class Window:
    """Updates since the last look, left on the device until somebody looks, and the speed meanwhile."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.updates: list[Done] = []
        self.speed = self.overall = self._seconds = 0.0
        self._tokens = 0
        self.restart()

    def add(self, done: Done) -> None:
        """Note one step's."""
        self.updates.append(done)

    def read(self) -> tuple[list[float], list[float], list[list[float]]]:
        """Losses, norms and what was told (means over the processes) of the steps since the last look; waits for the
        device."""
        if not self.updates:
            return [], [], []
        ours = torch.stack([torch.cat([done.loss[None], done.told]) for done in self.updates])
        losses, *told = self.group.mean(ours).T.tolist()
        norms = torch.stack([done.norm for done in self.updates]).tolist()
        seconds, tokens = time.monotonic() - self._mark, sum(done.tokens for done in self.updates)
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        self.speed, self.overall = tokens / seconds, self._tokens / self._seconds
        self.updates = []
        self.restart()
        return losses, norms, told

    def restart(self) -> None:
        """Measure time from now on (after something that was no step)."""
        self._mark = time.monotonic()
