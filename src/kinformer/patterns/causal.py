"""The causal pattern: every token sees itself and all earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Band


class Causal(Band):
    """The pairs with 0 <= q - k, without another bound."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "causal"

        def build(self) -> Causal:
            return Causal()
