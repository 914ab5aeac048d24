"""In which slot an encoding of positions acts: the model's, at its tokens, or a mixer's, inside attention.

In the other slot it would do nothing, so that a model would be trained without positions; there it is refused.
"""

from __future__ import annotations

from kinformer.core.config import describe
from kinformer.core.parts import Position, PositionConfig
from kinformer.runtime.errors import KinformerError


class AtTokens(PositionConfig):
    """Of an encoding that is added to token embeddings; a mixer refuses it."""

    bounded_by_training = True

    def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Position:
        raise KinformerError(
            f"{describe(self)} is added to token embeddings, but was given to a mixer; set it as the model's position, "
            "and the mixer's to none or to one that acts on attention (rope, alibi, shaw, t5, xl)."
        )


class InAttention(PositionConfig):
    """Of an encoding that acts on the heads of a mixer (``build_heads``); a model refuses it."""

    def build_model(self, dim: int, depth: int) -> Position:
        raise KinformerError(
            f"{describe(self)} acts inside attention, but was given to the model; set it as layers.*.mixer.position, "
            "and the model's position to none."
        )

    def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Position:
        return self.build(head_dim)
