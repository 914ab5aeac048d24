"""The interface of a feature map, which replaces the exponential of softmax attention so that attention is a sum."""

from __future__ import annotations

from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.runtime.errors import KinformerError


class FeatureMap(nn.Module):
    """A map of queries and keys [batch, heads, time, head_dim] to features [..., size]; ``size(head_dim)`` is the
    width.

    ``signed``: products of features may be negative or vanish, so that their sum normalises nothing. ``negative``:
    features themselves may be. ``positive_on_average``: products are positive on average alone, so that a sum of a few
    may vanish. ``bounded``: no token's features are longer than 1, which keeps the delta rule stable.
    ``scaled``: the result of ``keys`` lacks a factor, whose logarithm comes with it, as it may be too large or too
    small for a number; the result of ``queries`` may lack any factor, as only quotients are used.
    """

    signed: bool = False
    negative: bool = False
    positive_on_average: bool = False
    bounded: bool = False
    scaled: bool = False

    def size(self, head_dim: int) -> int:
        return head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of queries and keys, where they are alike."""
        raise NotImplementedError

    def queries(self, q: Tensor) -> Tensor:
        return self(q)

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return features, and the logarithm [batch, heads, time] of the factor
        that they lack (None: they lack none)."""
        return self(k), None


def check_normaliser(feature_map: FeatureMap, kind: str, floor: float, otherwise: str = "") -> None:
    """Refuse the ``feature_map`` of this ``kind`` under a normaliser that sums its products, no less than ``floor``;
    ``otherwise`` is a further remedy."""
    if feature_map.signed or (feature_map.positive_on_average and not floor):
        remedy = "" if feature_map.signed else "floor = 0.1, or "
        raise KinformerError(
            f"the feature map {kind!r} has products of either sign, whose sum may vanish, but the normaliser divides "
            f"by it; use {remedy}a feature map of positive features (elu, relu, favor){otherwise}."
        )


class FeatureMapConfig(Config):
    slot = "feature_map"

    def build(self, head_dim: int) -> FeatureMap:
        raise NotImplementedError

    def build_heads(self, num_heads: int, head_dim: int) -> FeatureMap:
        """Build the map for a mixer of ``num_heads`` heads, where heads differ."""
        return self.build(head_dim)
