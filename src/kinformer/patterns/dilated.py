"""Dilated window (Beltagy et al. 2020, Longformer, section 3.1): a local window with gaps, wider at the same cost."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.patterns.comb import Comb
from kinformer.patterns.per_head import per_head
from kinformer.runtime.errors import KinformerError


class Dilated(Comb):
    """The pairs with q - k = d * dilation for -ahead <= d < window: the token and every ``dilation``-th before it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config: ``window`` and ``ahead`` count keys; ``dilations`` has one
        dilation per head, instead of ``dilation``."""

        kind = "dilated"
        window: int = 256
        ahead: int = 0
        dilation: int = 2
        dilations: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            if self.window < 1:
                raise KinformerError(f"window must be 1 or more (the token itself counts), but is {self.window}.")
            if self.ahead < 0:
                raise KinformerError(f"ahead must be 0 (causal) or more, but is {self.ahead}.")
            for dilation in (self.dilation, *self.dilations):
                if dilation < 1:
                    raise KinformerError(f"a dilation must be 1 (no gaps) or more, but is {dilation}.")

        def build(self) -> Pattern:
            return per_head([self._dilated(dilation) for dilation in self.dilations or (self.dilation,)])

        def _dilated(self, dilation: int) -> Dilated:
            return Dilated(behind=(self.window - 1) * dilation, ahead=self.ahead * dilation, stride=dilation)
