"""Every token sees itself and all earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Band


class Causal(Band):
    """0 <= q - k."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "causal"

        def build(self) -> Causal:
            return Causal()
