"""Deterministic parameter-free projection, DPFP (Schlag et al. 2021, equation 37).

    r = relu([x, -x]),   phi(x) = concat over i = 1 .. nu of  r * roll(r, i)

Sparse and positive; 2 * head_dim * nu features. The paper pairs r_j with r_(j+i), the authors' code (and this one)
with r_(j-i): a permutation of the same features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig
from kinformer.runtime.errors import KinformerError


class Dpfp(FeatureMap):
    """The feature map [..., head_dim] -> [..., 2 * head_dim * nu]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "dpfp"
        nu: int = 1

        def build(self, head_dim: int) -> Dpfp:
            if not 1 <= self.nu < 2 * head_dim:
                raise KinformerError(f"nu must be 1 to {2 * head_dim - 1} for head_dim {head_dim}, but is {self.nu}.")
            return Dpfp(self.nu)

    def __init__(self, nu: int) -> None:
        super().__init__()
        self.nu = nu

    def size(self, head_dim: int) -> int:
        return 2 * head_dim * self.nu

    def forward(self, x: Tensor) -> Tensor:
        r = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([r * r.roll(i, dims=-1) for i in range(1, self.nu + 1)], dim=-1)
