"""Quadratic features: the exact feature space of the squared kernel.

phi(q) . phi(k) = (q . k + c)^2,
phi(x) = [x_i^2, sqrt(2) x_i x_j for i < j, sqrt(2 c) x_i, c]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig
from kinformer.runtime.errors import KinformerError


class Quadratic(FeatureMap):
    """The feature map [..., d] -> [..., d (d + 1) / 2 + d + 1]; the last feature is the constant c."""

    negative = True

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "quadratic"
        c: float = 1.0

        def __post_init__(self) -> None:
            if self.c < 0:
                raise KinformerError(f"c must not be negative (its root is a feature), but is {self.c}.")

        def build(self, head_dim: int) -> Quadratic:
            return Quadratic(self.c)

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c = c

    def size(self, head_dim: int) -> int:
        return head_dim * (head_dim + 1) // 2 + head_dim + 1

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1], offset=1, device=x.device)
        pairs = x[..., rows] * x[..., columns] * 2**0.5
        constant = torch.full_like(x[..., :1], self.c)
        return torch.cat([x * x, pairs, x * (2 * self.c) ** 0.5, constant], dim=-1)
