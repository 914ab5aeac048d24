"""Scaled dot product with a soft cap (Gemma 2, Riviere et al. 2024, section 2): cap * tanh(scale * q.k / cap).

No score exceeds ``cap``; far below it the score is that of ``scaled_dot``. Terms by distance are added to what is
capped.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.core.parts import Score, ScoreConfig
from kinformer.runtime.errors import KinformerError


class Capped(Score):
    """The score cap * tanh(scale * q . k / cap); ``scale`` is head_dim ** -0.5 unless it is set."""

    form = "capped"

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "capped"
        cap: float = 50.0
        scale: float | None = None

        def __post_init__(self) -> None:
            if not self.cap > 0:
                raise KinformerError(f"cap must be above 0, but is {self.cap:g}.")

        def build(self, num_heads: int, head_dim: int) -> Capped:
            return Capped(self.cap, head_dim**-0.5 if self.scale is None else self.scale)

    def __init__(self, cap: float, scale: float) -> None:
        super().__init__()
        self.scale, self.inner = cap, scale / cap

    def queries(self, q: Tensor) -> Tensor:
        return q * self.inner
