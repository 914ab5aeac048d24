"""Means of weights: over the last checkpoints of a run (Vaswani et al. 2017, section 6.1), or a moving mean over steps.

The moving mean forgets with the length of the run (polynomial-decay averaging, Shamir and Zhang 2013):

    mean_t = mean_(t-1) + (w_t - mean_(t-1)) / (1 + share t),   t = 0, 1, ...

At every step it covers about a ``share`` of the steps so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.data_module import UNDIVIDED, Layouts


class MovingAverage:
    """The moving mean of the parameters of ``model``, without its buffers; empty where ``share`` is 0."""

    def __init__(self, model: nn.Module, share: float, layouts: Layouts = UNDIVIDED) -> None:
        self.share, self.layouts = share, layouts
        self.named = {name: named_parameter.detach() for name, named_parameter in model.named_parameters() if share}
        self.means = {name: value.clone() for name, value in self.named.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after update number ``step``, counted from 0."""
        if self.named:
            # mean_t = mean_(t-1) + (w_t - mean_(t-1)) / (1 + share t)
            torch._foreach_lerp_(list(self.means.values()), list(self.named.values()), 1 / (1 + self.share * step))

    def applied(self) -> AbstractContextManager[None]:
        """Replace the model's weights by their means within the context."""
        return swapped(self.named, self.means)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the means by the names of their parameters, sharded over processes as these are."""
        return self.means

    def rooms(self) -> dict[str, Tensor]:
        """Return memory for the means of a checkpoint."""
        return {name: self.layouts.room(name, mean, mean) for name, mean in self.means.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the means of a checkpoint, whole tensors by name."""
        for name, mean in self.means.items():
            mean.copy_(self.layouts.placed(name, tensors[name], mean))


def mean_weights(
    model: nn.Module, checkpoints: Checkpoints, steps: Sequence[int], layouts: Layouts = UNDIVIDED
) -> dict[str, Tensor]:
    """Return the mean of the weights of ``model`` and of the checkpoints of ``steps``, sharded over processes as the
    model's weights are. Integer and boolean tensors are copied from the model."""
    weights_now = {name: weight for name, weight in model.state_dict().items() if weight.is_floating_point()}
    # The sum is in float64, so only the final division rounds noticeably, whatever the number of checkpoints.
    total = {name: weight.to(torch.float64, copy=True) for name, weight in weights_now.items()}
    for step in steps:
        rooms = {name: layouts.room(name, weight, weight) for name, weight in weights_now.items()}
        weights = checkpoints.weights(step, rooms)
        for name, weight in weights_now.items():
            total[name] += layouts.placed(name, weights[name], weight).to(weight.device)
    return {name: (weight / (len(steps) + 1)).to(weights_now[name].dtype) for name, weight in total.items()}


def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Replace the weights of ``model`` within the context. The other weights have the same names and the same sharding
    over processes."""
    weights_now = model.state_dict()
    return swapped({name: weights_now[name] for name in weights}, weights)


@contextmanager
def swapped(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the tensors ``weights`` the values of ``others`` within the context."""
    before = {name: value.detach().clone() for name, value in weights.items()}
    put(weights, others)
    try:
        yield
    finally:
        put(weights, before)


@torch.no_grad()
def put(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give the tensors ``weights`` the values of their names."""
    for name, value in weights.items():
        value.copy_(values[name])
