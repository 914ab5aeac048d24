"""The local window: every token sees itself, the ``window - 1`` tokens before it and, with ``ahead``, some after it."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Band
from kinformer.runtime.errors import KinformerError


class Local(Band):
    """The pairs with -ahead <= q - k < window; with ``ahead = 0`` a decoder stores window - 1 past tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "local"
        window: int = 256
        ahead: int = 0

        def __post_init__(self) -> None:
            if self.window < 1:
                raise KinformerError(f"window must be 1 or more (the token itself counts), but is {self.window}.")
            if self.ahead < 0:
                raise KinformerError(f"ahead must be 0 (causal) or more, but is {self.ahead}.")

        def build(self) -> Local:
            return Local(behind=self.window - 1, ahead=self.ahead)
