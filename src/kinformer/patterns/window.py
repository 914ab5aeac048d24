"""Sliding window on both sides (Beltagy et al. 2020, Longformer, section 3.1), with gaps where dilated."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Band, Pattern
from kinformer.patterns.comb import Comb
from kinformer.patterns.per_head import per_head
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Window(PatternConfig):
    """The pairs with q - k = d * dilation for |d| <= window: ``window`` keys on either side, and the token itself.

    ``dilations`` has one dilation per head, instead of ``dilation``.
    """

    kind = "window"
    window: int = 256
    dilation: int = 1
    dilations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.window < 0:
            raise KinformerError(f"window must be 0 (the token itself) or more keys a side, but is {self.window}.")
        for dilation in (self.dilation, *self.dilations):
            if dilation < 1:
                raise KinformerError(f"a dilation must be 1 (no gaps) or more, but is {dilation}.")

    def build(self) -> Pattern:
        return per_head([self._window(dilation) for dilation in self.dilations or (self.dilation,)])

    def _window(self, dilation: int) -> Pattern:
        far = self.window * dilation
        return Band(behind=far, ahead=far) if dilation == 1 else Comb(behind=far, ahead=far, stride=dilation)
