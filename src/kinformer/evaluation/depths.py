"""The depth of each token in a model that lets tokens halt or leave early: steps taken, or layers used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kinformer.core.model import Model
from kinformer.core.stack import HaltingState
from kinformer.evaluation.adaptive_computation import PONDER_STEPS
from kinformer.evaluation.early_exit import LAYERS_PER_TOKEN, early_exit_stack
from kinformer.training.metric import Metric


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
    halting, exits = getattr(stack, "halting", None), early_exit_stack(model)
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
