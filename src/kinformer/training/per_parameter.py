"""The base of optimisers that update one parameter tensor after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from kinformer.runtime.sharding import is_sharded

ParameterGroup: TypeAlias = dict[str, Any]
"""A group of parameters of a PyTorch optimiser: its ``params`` and their settings, by name."""


class PerParameter(Optimizer):
    """The base class; a subclass defines in :meth:`move` how a gradient changes its parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update from the present gradients."""
        assert closure is None, "the loss is not computed again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)

    def move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        """Update ``parameter`` and its state in place, by the settings of its ``group``."""
        raise NotImplementedError


def scale_(update: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``update``, which may be sharded, by the scalar ``factor`` in place."""
    return update.mul_(float(factor) if is_sharded(update) else factor)
