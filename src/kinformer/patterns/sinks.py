"""A window and the first tokens (Xiao et al. 2023, StreamingLLM): what a trained model attends to in endless text.

Query t sees the keys j with j < count or t - window < j <= t. A decoder keeps ``count`` + ``window`` - 1 keys, whatever
the length, and counts positions inside this cache: a first token stands at j, a query at min(t, count + window - 1) for
it, so that no distance exceeds those of a text of count + window tokens. Texts that are no longer than the window are
attended to in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Band, Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True)
class Sinks(Pattern):
    """The pairs with k < count or q - k < window, k <= q. Parts of other patterns see them by absolute positions."""

    count: int
    window: int

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config; ``window`` counts the token itself."""

        kind = "sinks"
        count: int = 4
        window: int = 256

        def __post_init__(self) -> None:
            if self.count < 1:
                raise KinformerError(f"count must be 1 first token or more, but is {self.count}; without, use 'local'.")
            if self.window < 1:
                raise KinformerError(f"window must be 1 or more (the token itself counts), but is {self.window}.")

        def build(self) -> Sinks:
            return Sinks(self.count, self.window)

    @property
    def pinned(self) -> int:  # type: ignore[override]
        return self.count

    @property
    def recent(self) -> Pattern:
        return Band(behind=self.window - 1)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k < self.count) | (q - k < self.window))

    def cover(self, boxes: Boxes) -> Cover:
        causal, near = Band().cover(boxes), Band(behind=self.window - 1).cover(boxes)
        every = np.where(boxes.k_high < self.count, ALL, np.where(boxes.k_low < self.count, SOME, NONE))
        return np.maximum(np.minimum(causal, every), near).astype(np.int8)
