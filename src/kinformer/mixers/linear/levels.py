"""The weights of levels of log-linear attention, by token and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LevelScales(nn.Module):
    """lambda_t = softplus(scale * W x_t) [batch, heads, time, levels + 1] of x [batch, time, dim], as the authors have
    it; ``scale`` [heads, levels + 1] begins with 1."""

    def __init__(self, dim: int, heads: int, levels: int) -> None:
        super().__init__()
        self.levels = nn.Linear(dim, heads * (levels + 1), bias=False)
        self.scale = nn.Parameter(torch.ones(heads, levels + 1))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.scale * self.levels(x).unflatten(-1, self.scale.shape)
        # softplus, whose own backward breaks in a compiled graph behind a transposed tensor
        return torch.logaddexp(heads, heads.new_zeros(())).transpose(1, 2)
