"""One update: rows in, forward and backward in parts, gradients clipped, weights moved."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.data import Sampler
from kinformer.data.permutation import mix
from kinformer.training.carried import Carried
from kinformer.training.distributed import Group
from kinformer.training.objectives import Batch
from kinformer.training.optimiser import Optimiser
from kinformer.training.settings import Settings


class Updater:
    """Makes update number ``step`` of the weights behind ``engine``, a wrapped ``Step``."""

    def __init__(
        self,
        engine: nn.Module,
        optimiser: Optimiser,
        carried: Carried,
        sampler: Sampler,
        settings: Settings,
        group: Group,
    ) -> None:
        self.engine, self.optimiser, self.carried, self.sampler = engine, optimiser, carried, sampler
        self.settings, self.group = settings, group
        self.rows = settings.rows(group.world)

    def forget(self) -> None:
        """Let go of the optimiser's state and the carried states, as before the first step."""
        self.optimiser.forget()
        self.carried.clear()

    def __call__(self, step: int, rate: float, progress: float) -> tuple[Tensor, Tensor]:
        """The loss of this process's rows and the norm of the gradient, both scalars still on the device."""
        self._seed_masks(step)
        batch = self._batch(step)
        parts = self.settings.accumulate
        losses = []
        for part in range(parts):
            with self.group.exchange(self.engine, part == parts - 1):
                losses.append(self._part(part, batch, progress))
        norm = self.optimiser.clip(self.settings.clip)
        self.optimiser.step(rate)
        return torch.stack(losses).mean(), norm.detach()

    def _part(self, part: int, batch: Batch, progress: float) -> Tensor:
        rows = batch.rows(slice(part * self.rows, (part + 1) * self.rows))
        loss, _, state = self.engine(rows, self.carried.states[part], progress)
        (loss / self.settings.accumulate).backward()
        if self.settings.segments:
            self.carried.put(part, state)
        return loss.detach()

    def _seed_masks(self, step: int) -> None:
        """Begin the step's random masks: they depend on nothing before, so a resumed run draws the same."""
        seed = int(mix(self.settings.seed, step, self.group.rank)[0])
        torch.default_generator.manual_seed(seed)
        if self.group.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _batch(self, step: int) -> Batch:
        shares = (
            self.sampler.batch(step, self.group.rank, self.group.world),
            self.sampler.resets(step, self.group.rank, self.group.world),
        )
        return Batch(*(self._place(share) for share in shares))

    def _place(self, share: Any) -> Any:
        if share is None:
            return None
        tensor = torch.from_numpy(share)
        if self.group.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.group.device, non_blocking=True)


class Window:
    """Losses and norms since the last look, left on the device until somebody looks, and the speed meanwhile."""

    def __init__(self, settings: Settings, group: Group) -> None:
        self.tokens_per_step, self.group = settings.batch_size * settings.length, group
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.speed = self.overall = self._seconds = 0.0
        self._tokens = 0
        self.restart()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Note one step's."""
        self.losses.append(loss)
        self.norms.append(norm)

    def read(self) -> tuple[list[float], list[float]]:
        """The losses (means over the processes) and norms of the steps since the last look; waits for the device."""
        if not self.losses:
            return [], []
        losses = self.group.mean(torch.stack(self.losses)).tolist()
        norms = torch.stack(self.norms).tolist()
        seconds, tokens = time.monotonic() - self._mark, self.tokens_per_step * len(losses)
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        self.speed, self.overall = tokens / seconds, self._tokens / self._seconds
        self.losses, self.norms = [], []
        self.restart()
        return losses, norms

    def restart(self) -> None:
        """Measure time from now on (after something that was no step)."""
        self._mark = time.monotonic()
