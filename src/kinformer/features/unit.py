"""Features of length 1, which keep the delta rule stable (Yang et al. 2024, DeltaNet; 2025, Gated DeltaNet).

phi(x) / sqrt(|phi(x)|^2 + eps) for the features phi that are ``inner``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig
from kinformer.features.identity import Identity
from kinformer.features.nested import Nested


class Unit(Nested):
    """The feature map [..., head_dim] -> [..., size of the inner features]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "unit"
        inner: FeatureMapConfig = Identity.Config()
        eps: float = 1e-6

        def build_heads(self, num_heads: int, head_dim: int) -> Unit:
            return Unit(self.inner.build_heads(num_heads, head_dim), self)

        def build(self, head_dim: int) -> Unit:
            return Unit(self.inner.build(head_dim), self)

    def __init__(self, inner: FeatureMap, config: Config) -> None:
        super().__init__(inner)
        self.eps = config.eps

    def normed(self, features: Tensor) -> Tensor:
        return features * (features.square().sum(dim=-1, keepdim=True) + self.eps).rsqrt()
