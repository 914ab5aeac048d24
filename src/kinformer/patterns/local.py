"""Local window: every token sees itself and the ``window - 1`` tokens before it."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.errors import KinformerError
from kinformer.core.parts import Pattern, PatternConfig


class Local(Pattern):
    """0 <= q - k < window; a decoder keeps window - 1 past tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "local"
        window: int = 256

        def __post_init__(self) -> None:
            if self.window < 1:
                raise KinformerError(f"window must be 1 or more (the token itself counts), but is {self.window}.")

        def build(self) -> Local:
            return Local(self)

    def __init__(self, config: Config) -> None:
        self.behind = config.window - 1
