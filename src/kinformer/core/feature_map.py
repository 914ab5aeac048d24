"""The interface of a feature map, which replaces the exponential of softmax attention so that attention is a sum."""

from __future__ import annotations

from torch import Tensor, nn

from kinformer.core.config import Config


class FeatureMap(nn.Module):
    """A map of queries and keys [batch, heads, time, head_dim] to features [..., size]; ``size(head_dim)`` is the
    width.

    ``signed``: products of features may be negative or vanish, so that their sum normalises nothing. ``negative``:
    features themselves may be. ``bounded``: no token's features are longer than 1, which keeps the delta rule stable.
    ``scaled``: the result of ``keys`` lacks a factor, whose logarithm comes with it, as it may be too large or too
    small for a number; the result of ``queries`` may lack any factor, as only quotients are used.
    """

    signed: bool = False
    negative: bool = False
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


class FeatureMapConfig(Config):
    slot = "feature_map"

    def build(self, head_dim: int) -> FeatureMap:
        raise NotImplementedError

    def build_heads(self, num_heads: int, head_dim: int) -> FeatureMap:
        """Build the map for a mixer of ``num_heads`` heads, where heads differ."""
        return self.build(head_dim)
