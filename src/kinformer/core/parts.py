"""The narrow interfaces of the parts that a mixer is made of: position, pattern, score, projection, feature map.

Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).
Kernel attention = feature map x update rule. Every part has a :class:`Config` of its slot, built by its owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.errors import KinformerError


class Position(nn.Module):
    """Where: hooks through which an encoding of positions enters; each does nothing unless overridden.

    ``max_length`` is the first position that has no encoding, or None where every position has one.
    """

    max_length: int | None = None

    def embed(self, positions: Tensor) -> Tensor | None:
        """What is added to the token embeddings: [batch, time, dim] for ``positions`` [batch, time], or None."""
        return None

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, heads, time, head_dim] after the encoding of ``positions`` [batch, time]."""
        return q, k


class PositionConfig(Config):
    """``build(dim)``: ``dim`` is the model's width for ``embed``, the head's width for ``rotate``."""

    slot = "position"

    def build(self, dim: int) -> Position:
        raise NotImplementedError


class Region(NamedTuple):
    """Keys ``start <= k < stop``; ``full`` when every query of the block sees every key of the region."""

    start: int
    stop: int
    full: bool


class Pattern:
    """Who: which key a query may see, by absolute positions within one sequence.

    ``allowed`` is the truth. ``regions`` covers it without touching all pairs. ``behind`` and ``ahead`` say how far
    a query sees (None: without bound); ``ahead = 0`` is what a decoder needs. ``horizon`` is how many past keys a
    later query can still see, which bounds a decoder's state.
    """

    behind: int | None = None
    ahead: int | None = 0

    @property
    def horizon(self) -> int | None:
        return self.behind

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Bool tensor of the broadcast shape of query positions ``q`` and key positions ``k``."""
        distance = q - k
        seen = distance == distance
        if self.behind is not None:
            seen = seen & (distance <= self.behind)
        if self.ahead is not None:
            seen = seen & (distance >= -self.ahead)
        return seen

    def regions(self, start: int, stop: int, length: int) -> Iterator[Region]:
        """Disjoint key intervals that the queries ``start <= q < stop`` of a sequence of ``length`` see."""
        low = 0 if self.behind is None else max(0, start - self.behind)
        high = length if self.ahead is None else min(length, stop + self.ahead)
        full_low = 0 if self.behind is None else max(0, stop - 1 - self.behind)
        full_high = length if self.ahead is None else min(length, start + 1 + self.ahead)
        if full_low >= full_high:
            if low < high:
                yield Region(low, high, False)
            return
        for region in (
            Region(low, full_low, False),
            Region(full_low, full_high, True),
            Region(full_high, high, False),
        ):
            if region.start < region.stop:
                yield region

    def retained(self, position: int) -> range:
        """The key positions before ``position`` that some query at or after ``position`` can see."""
        return range(0 if self.horizon is None else max(0, position - self.horizon), position)


class PatternConfig(Config):
    slot = "pattern"

    def build(self) -> Pattern:
        raise NotImplementedError


class Score(nn.Module):
    """How much: the factor on the product of a query and a key, ``scale(head_dim)``."""

    def scale(self, head_dim: int) -> float:
        raise NotImplementedError


class ScoreConfig(Config):
    slot = "score"

    def build(self) -> Score:
        raise NotImplementedError


class Projection(nn.Module):
    """What: x [batch, time, dim] to q [batch, num_heads, time, head_dim], k and v [batch, num_kv_heads, ...]."""

    num_kv_heads: int

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class ProjectionConfig(Config):
    slot = "projection"

    def build(self, dim: int, num_heads: int, head_dim: int) -> Projection:
        raise NotImplementedError


class FeatureMap(nn.Module):
    """x [..., head_dim] to features [..., size]; ``size(head_dim)`` tells the width."""

    def size(self, head_dim: int) -> int:
        return head_dim

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class FeatureMapConfig(Config):
    slot = "feature_map"

    def build(self, head_dim: int) -> FeatureMap:
        raise NotImplementedError


class ResidualOutput(nn.Linear):
    """A product that writes into the residual stream; some initialisations shrink these by the model's depth."""


class HeadConfig(Config):
    """``build(dim, vocab_size)``: a module (hidden [batch, time, dim], embedding weight [vocab, dim]) -> logits."""

    slot = "head"

    def build(self, dim: int, vocab_size: int) -> nn.Module:
        raise NotImplementedError


def head_width(dim: int, num_heads: int) -> int:
    """dim / num_heads, which must be whole."""
    if num_heads < 1 or dim % num_heads:
        raise KinformerError(
            f"num_heads = {num_heads} does not divide dim = {dim}; choose a divisor, or give head_dim."
        )
    return dim // num_heads


def merge_heads(y: Tensor) -> Tensor:
    """[batch, heads, time, head_dim] -> [batch, time, heads * head_dim]."""
    return y.transpose(1, 2).flatten(2)
