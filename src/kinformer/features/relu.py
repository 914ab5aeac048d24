"""ReLU features: max(x, 0). A token whose features all vanish writes and reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.core.feature_map import FeatureMap, FeatureMapConfig


class Relu(FeatureMap):
    """The feature map [..., head_dim] -> [..., head_dim]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "relu"

        def build(self, head_dim: int) -> Relu:
            return Relu()

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()
