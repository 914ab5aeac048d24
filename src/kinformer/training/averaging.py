"""Means of weights: of the last checkpoints of a run (Vaswani et al. 2017, section 6.1), or a moving one of all steps.

The moving mean forgets with the length of the run (polynomial-decay averaging, Shamir and Zhang 2013):

    mean_t = mean_(t-1) + (w_t - mean_(t-1)) / (1 + share t),   t = 0, 1, ...

so that it looks back over about a ``share`` of the steps so far, whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from kinformer.runtime.files import load_tensors
from kinformer.runtime.sharding import like
from kinformer.training.checkpoint import Checkpoints


class MovingAverage:
    """The moving mean of the parameters of ``model``, not of its buffers; of none where ``share`` is 0."""

    def __init__(self, model: nn.Module, share: float) -> None:
        self.share = share
        self.named = {name: named_parameter.detach() for name, named_parameter in model.named_parameters() if share}
        self.means = {name: value.clone() for name, value in self.named.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update number ``step``, counted from 0."""
        if self.named:
            torch._foreach_lerp_(list(self.means.values()), list(self.named.values()), 1 / (1 + self.share * step))

    def applied(self) -> AbstractContextManager[None]:
        """The model with the mean for its weights meanwhile."""
        return _swapped(self.named, self.means)

    def state_dict(self) -> dict[str, Tensor]:
        """The means by the names of their parameters, spread over processes as these are."""
        return self.means

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the means of a checkpoint, whole tensors by name."""
        for name, mean in self.means.items():
            mean.copy_(like(mean, tensors[name]))


def mean_weights(checkpoints: Checkpoints, count: int) -> dict[str, Tensor]:
    """The mean of the last ``count`` checkpoints' weights, or of as many as there are; what is no floating-point number
    is the last one's."""
    total: dict[str, Tensor] = {}
    steps = checkpoints.steps()[-count:]
    for step in steps:
        weights = load_tensors(checkpoints.path(step) / "model.safetensors")[0]
        for name, weight in weights.items():
            total_weight = total.get(name) if weight.is_floating_point() else None
            total[name] = weight if total_weight is None else total_weight.double() + weight
    return {
        name: (weight / len(steps)).to(weights[name].dtype) if weight.is_floating_point() else weight
        for name, weight in total.items()
    }


def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """``model`` with other weights meanwhile, whole tensors by name."""
    local = model.state_dict()
    return _swapped(local, {name: like(weight, weights[name]) for name, weight in local.items()})


@contextmanager
def _swapped(own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """``own`` tensors with what the ``others`` hold meanwhile."""
    before = {name: value.detach().clone() for name, value in own.items()}
    _put(own, others)
    try:
        yield
    finally:
        _put(own, before)


@torch.no_grad()
def _put(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in own.items():
        value.copy_(values[name])
