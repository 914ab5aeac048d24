"""Scaled dot product (Vaswani et al. 2017, equation 1): q.k / sqrt(head_dim), or q.k times a scale."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import Score, ScoreConfig


class ScaledDot(Score):
    """The score q . k times ``scale``, which is head_dim ** -0.5 unless it is set."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "scaled_dot"
        scale: float | None = None

        def build(self, num_heads: int, head_dim: int) -> ScaledDot:
            return ScaledDot(head_dim**-0.5 if self.scale is None else self.scale)

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
