"""The depth of each token in a model that lets tokens halt or leave early: steps taken, or layers used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn

from kinformer.core.model import Model, device_of
from kinformer.core.parts import Selection
from kinformer.lab.evaluation.exits import LAYERS_PER_TOKEN, early_exit_stack
from kinformer.lab.training.logging import Metric
from kinformer.stacks.universal import HaltingState, Universal

# Steps per token in a model whose stack lets tokens halt.

PONDER_STEPS = Metric("ponder_steps", "steps per token")


class PonderRecorder:
    """The steps that the tokens of a model have taken so far; ``halts``: whether they can take fewer than all."""

    def __init__(self, model: nn.Module) -> None:
        stacks = (module for module in model.modules() if isinstance(module, Universal))
        self.deciding = [stack.halting for stack in stacks if stack.halting is not None]
        self.tokens, self.steps = 0, 0

    @property
    def halts(self) -> bool:
        return bool(self.deciding)

    @property
    def mean(self) -> float | None:
        """Return the steps per token, None where there were no tokens or nothing halts."""
        return self.steps / self.tokens if self.tokens else None

    def note(self, progress: HaltingState) -> None:
        """Count the tokens that take the step in ``progress``."""
        running = int(progress.running.sum())
        self.steps += running
        self.tokens += running if progress.number == 0 else 0


@contextmanager
def noting_steps(model: nn.Module) -> Iterator[PonderRecorder]:
    """Count the steps of all valid tokens of ``model`` within the context."""
    recorder = PonderRecorder(model)

    def hook(_: nn.Module, inputs: tuple[HaltingState, *tuple[object, ...]]) -> None:
        recorder.note(inputs[0])

    handles = [counter.register_forward_pre_hook(hook) for counter in recorder.deciding]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


class Depths:
    """The depths of tokens: ``last`` [batch, time] int64 are the steps or layers of the last call, 0 where not valid,
    in the order in which the model left-aligned them; ``metric`` says what they count."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.last = torch.zeros(0, 0, dtype=torch.int64)

    def step(self, _: nn.Module, arguments: tuple[HaltingState, *tuple[object, ...]]) -> None:
        """Record which tokens take the next step of a stack whose tokens halt."""
        progress = arguments[0]
        running = progress.running.long()
        self.last = running if progress.number == 0 else self.last + running

    def left(self, layers: Tensor, exits: Tensor, valid: Tensor | None) -> None:
        """Record by which of the exits, behind this many ``layers``, the tokens of a chunk left."""
        depth = layers.to(exits.device)[exits]
        self.last = depth if valid is None else depth.masked_fill(~valid, 0)


@contextmanager
def noting_depths(model: nn.Module | Model) -> Iterator[Depths | None]:
    """Record the depths of all tokens of ``model``, a causal one, within the
    context; None where all go equally deep."""
    stack = getattr(model, "stack", None)
    halting, exits = stack.halting if isinstance(stack, Universal) else None, early_exit_stack(model)
    if halting is not None:
        depths = Depths(PONDER_STEPS)
        hook = halting.register_forward_pre_hook(depths.step)
    elif exits is not None:
        depths, layers = Depths(LAYERS_PER_TOKEN), torch.tensor([use + 1 for use in exits.exits])
        hook = exits.left.register_forward_hook(lambda _, batch, __: depths.left(layers, *batch))
    else:
        yield None
        return
    try:
        yield depths
    finally:
        hook.remove()


# The usage of a model's memory tables and experts: the weight of every value in all look-ups (Lample et al. 2019,
# section 4.5).
#
# z_i = sum over tokens of the weight of value i, divided by the sum over all values
# used = share of the values with z_i > 0,    kl = log n + sum_i z_i log z_i    (0 where all are used alike)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The usage of the table, or mixture, ``part`` of ``values`` values or experts: the share ``used``,
    and ``kl`` in nats from using all alike."""

    part: str
    values: int
    used: float
    kl: float


class Usages:
    """The weights of a model's tables in all look-ups so far."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = {
            name: part for name, part in model.named_modules() if isinstance(part, nn.EmbeddingBag | Selection)
        }
        self.weights = {
            name: torch.zeros(_size(table), dtype=torch.float64, device=device_of(model))
            for name, table in self.tables.items()
        }

    def note(self, name: str, slots: Tensor, weights: Tensor) -> None:
        """Add look-ups of ``slots`` and their ``weights``, of equal shapes."""
        self.weights[name].index_add_(0, slots.flatten(), weights.detach().double().flatten())

    def read(self) -> tuple[Usage, ...]:
        """Return the usage of each table, none where the model has no table or made no look-up."""
        usages = []
        for name, weights in self.weights.items():
            if not (total := float(weights.sum())):
                continue
            shares = weights[weights > 0] / total
            # log n + sum_i z_i log z_i, in which values that were never used count 0
            kl = log(len(weights)) + float((shares * shares.log()).sum())
            part = name.removesuffix(".values").removesuffix(".selection").removeprefix("stack.")
            usages.append(Usage(part=part, values=len(weights), used=len(shares) / len(weights), kl=max(0.0, kl)))
        return tuple(usages)


def _size(table: nn.EmbeddingBag | Selection) -> int:
    return table.size if isinstance(table, Selection) else table.num_embeddings


@contextmanager
def record_usage(model: nn.Module) -> Iterator[Usages]:
    """Record every look-up that ``model`` makes in the tables (slots, weights) of its memories within the context."""
    usages = Usages(model)

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, Tensor]], None]:
        return lambda module, inputs: usages.note(name, *inputs)

    handles = [table.register_forward_pre_hook(hook(name)) for name, table in usages.tables.items()]
    try:
        yield usages
    finally:
        for handle in handles:
            handle.remove()
