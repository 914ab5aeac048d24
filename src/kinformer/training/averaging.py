"""The mean of the weights of the last checkpoints of a run (Vaswani et al. 2017, section 6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kinformer.core.files import load_tensors
from kinformer.core.spread import like
from kinformer.training.checkpoint import Checkpoints


def mean_weights(checkpoints: Checkpoints, count: int) -> dict[str, Tensor]:
    """The mean of the last ``count`` checkpoints' weights, or of as many as there are; what is no floating-point number
    is the last one's."""
    total: dict[str, Tensor] = {}
    steps = checkpoints.steps()[-count:]
    for step in steps:
        weights = load_tensors(checkpoints.path(step) / "model.safetensors")[0]
        for name, weight in weights.items():
            known = total.get(name) if weight.is_floating_point() else None
            total[name] = weight if known is None else known.double() + weight
    return {
        name: (weight / len(steps)).to(weights[name].dtype) if weight.is_floating_point() else weight
        for name, weight in total.items()
    }


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """``model`` with other weights meanwhile."""
    own = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    _put(model, weights)
    try:
        yield
    finally:
        _put(model, own)


@torch.no_grad()
def _put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in model.state_dict().items():
        weight.copy_(like(weight, weights[name]))
