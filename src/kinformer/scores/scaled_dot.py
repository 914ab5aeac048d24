"""Scaled dot product (Vaswani et al. 2017, equation 1): q.k / sqrt(head_dim)."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import Score, ScoreConfig


class ScaledDot(Score):
    """The score q . k times head_dim ** -0.5."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "scaled_dot"

        def build(self, num_heads: int, head_dim: int) -> ScaledDot:
            return ScaledDot(head_dim)

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
