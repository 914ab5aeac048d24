"""Plain dot product (Luong et al. 2015, equation 8, "dot"): q.k. T5 uses it too, and leaves the scale to weights."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import Score, ScoreConfig


class Dot(Score):
    """The score q . k without a factor."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "dot"

        def build(self, num_heads: int, head_dim: int) -> Dot:
            return Dot()
