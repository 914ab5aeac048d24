"""No position encoding: order enters only through causality."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import Position, PositionConfig


class NoPosition(Position):
    """No position: every hook leaves its tensors as they are."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "none"

        def build(self, dim: int) -> NoPosition:
            return NoPosition()
