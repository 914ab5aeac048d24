"""Adagrad (Duchi et al. 2011) whose steps are clipped parameter by parameter, as adaptive spans were trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kinformer.runtime.sharding import gathered, is_sharded

EPS = 1e-10


class ClippedAdagrad(Optimizer):
    """The optimiser; with g the gradient of one parameter tensor (Sukhbaatar et al. 2019, the authors' code):

        sum <- sum + g^2,    w <- w - lr * min(1, clip / |g|) * g / (sqrt(sum) + eps)

    The sum has the gradient as it came; only the step is made shorter. ``clip`` 0 lets any pass. Weight decay is
    decoupled, w <- w - lr * weight_decay * w.
    """

    def __init__(self, params: Iterable[Any], lr: float, clip: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "clip": clip, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update from the present gradients."""
        assert closure is None, "the loss is not computed again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        # The gradient enters the sum as it came: only the step is clipped.
        state["sum"].addcmul_(gradient, gradient)
        update = gradient / state["sum"].sqrt().add_(EPS)
        if group["clip"]:
            norm = gathered(torch.linalg.vector_norm(gradient))
            factor = torch.where(norm > group["clip"], group["clip"] / (norm + EPS), torch.ones_like(norm))
            update.mul_(float(factor) if is_sharded(update) else factor)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])
