"""Queries and keys as they are (Sun et al. 2023, RetNet; Yang et al. 2024, GLA)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig


class Identity(FeatureMap):
    """The feature map [..., head_dim] -> [..., head_dim]."""

    signed = negative = True

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "identity"

        def build(self, head_dim: int) -> Identity:
            return Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x
