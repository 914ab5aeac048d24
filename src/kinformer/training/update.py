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

    def __call__(self, step: int, rate: float, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of this process's rows, the norm of the gradient, and the nats of a next token on average (the loss
        without what else was minimised): scalars still on the device."""
        self._seed_masks(step)
        batch = self._batch(step)
        parts = self.settings.accumulate
        costs = []
        for part in range(parts):
            with self.group.exchange(self.engine, part == parts - 1):
                costs.append(self._part(part, batch, progress))
        norm = self.optimiser.clip(self.settings.clip)
        self.optimiser.step(rate)
        loss, nats = torch.stack(costs).mean(dim=0)
        return loss, norm.detach(), nats

    def _part(self, part: int, batch: Batch, progress: float) -> Tensor:
        rows = batch.rows(slice(part * self.rows, (part + 1) * self.rows))
        loss, metrics, state = self.engine(rows, self.carried.states[part], progress)
        if self.settings.segments:
            self.carried.put(part, state)
        del state  # before the backward: it may be as large as the activations
        (loss / self.settings.accumulate).backward()
        return torch.stack([loss.detach(), metrics["nats"] / (self.rows * self.settings.length)])

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
    """Losses, norms and nats since the last look, left on the device until somebody looks, and the speed meanwhile."""

    def __init__(self, settings: Settings, group: Group) -> None:
        self.tokens_per_step, self.group = settings.batch_size * settings.length, group
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.nats: list[Tensor] = []
        self.speed = self.overall = self._seconds = 0.0
        self._tokens = 0
        self.restart()

    def add(self, loss: Tensor, norm: Tensor, nats: Tensor) -> None:
        """Note one step's."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.nats.append(nats)

    def read(self) -> tuple[list[float], list[float], list[float]]:
        """Losses, norms and nats (means over the processes) of the steps since the last look; waits for the device."""
        if not self.losses:
            return [], [], []
        losses, nats = self.group.mean(torch.stack([torch.stack(self.losses), torch.stack(self.nats)])).tolist()
        norms = torch.stack(self.norms).tolist()
        seconds, tokens = time.monotonic() - self._mark, self.tokens_per_step * len(losses)
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        self.speed, self.overall = tokens / seconds, self._tokens / self._seconds
        self.losses, self.norms, self.nats = [], [], []
        self.restart()
        return losses, norms, nats

    def restart(self) -> None:
        """Measure time from now on (after something that was no step)."""
        self._mark = time.monotonic()
