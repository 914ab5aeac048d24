"""Every token sees every token: for encoders and cross-attention; a decoder refuses it."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import Pattern, PatternConfig


class Full(Pattern):
    """No bound on either side."""

    ahead = None

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "full"

        def build(self) -> Full:
            return Full()
