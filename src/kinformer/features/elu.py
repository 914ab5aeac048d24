"""The feature map elu(x) + 1 (Katharopoulos et al. 2020, equation 7): positive, smooth, linear for large x."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig


class Elu(FeatureMap):
    """The feature map [..., head_dim] -> [..., head_dim]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "elu"

        def build(self, head_dim: int) -> Elu:
            return Elu()

    def forward(self, x: Tensor) -> Tensor:
        return functional.elu(x) + 1
