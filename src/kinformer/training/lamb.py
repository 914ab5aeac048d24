"""LAMB: AdamW's step scaled tensor by tensor to the length of its weights (You et al. 2020, algorithm 2).

    m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2       corrected for their beginning at 0
    r = m / (sqrt(v) + eps) + weight_decay w
    w <- w - lr |w| / |r| r                                              the factor is 1 where either norm is 0

So each tensor moves by the same share of its length, which lets large batches take large rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinformer.runtime.sharding import gathered
from kinformer.training.per_parameter import ParameterGroup, PerParameter, scale_

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

EPS = 1e-6


class Lamb(PerParameter):
    """The optimiser; ``betas`` are the decays of the means of gradients and of their squares."""

    def __init__(
        self, params: ParamsT, lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(EPS)
        update = (mean / (1 - beta1**steps)).div_(root).add_(parameter, alpha=group["weight_decay"])
        length, moved = (gathered(torch.linalg.vector_norm(tensor)) for tensor in (parameter, update))
        factor = torch.where((length > 0) & (moved > 0), length / moved, torch.ones_like(moved))
        parameter.sub_(scale_(update, factor), alpha=group["lr"])
