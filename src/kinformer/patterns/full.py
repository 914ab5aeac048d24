"""The full pattern: every token sees every token, for encoders and cross-attention; a decoder refuses it."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Band


class Full(Band):
    """All pairs, with no bound on either side."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "full"

        def build(self) -> Full:
            return Full(ahead=None)
