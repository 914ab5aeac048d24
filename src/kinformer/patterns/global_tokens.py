"""Global tokens (Beltagy et al. 2020, Longformer; Zaheer et al. 2020, Big Bird): the first ones, for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """The pairs with q < count or k < count: the first ``count`` tokens are seen by all and see all."""

    count: int

    ahead = None

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config; the pattern is two-sided, so a decoder takes it in an ``intersection`` with ``causal``."""

        kind = "global_tokens"
        count: int = 1

        def __post_init__(self) -> None:
            if self.count < 1:
                raise KinformerError(f"count must be 1 global token or more, but is {self.count}.")

        def build(self) -> GlobalTokens:
            return GlobalTokens(self.count)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (q < self.count) | (k < self.count)

    def cover(self, boxes: Boxes) -> Cover:
        some = (boxes.q_low < self.count) | (boxes.k_low < self.count)
        every = (boxes.q_high < self.count) | (boxes.k_high < self.count)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)
