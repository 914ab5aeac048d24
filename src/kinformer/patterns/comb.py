"""Pairs by their distance alone, at regular gaps: the shape from which dilated windows and columns are made."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from torch import Tensor

from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Pattern


@dataclass(frozen=True)
class Comb(Pattern):
    """The pairs with -ahead <= q - k <= behind and q - k a multiple of ``stride``; a bound of None bounds nothing."""

    behind: int | None = None
    ahead: int | None = 0
    stride: int = 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        seen = distance % self.stride == 0
        seen = seen if self.behind is None else seen & (distance <= self.behind)
        return seen if self.ahead is None else seen & (distance >= -self.ahead)

    def cover(self, boxes: Boxes) -> Cover:
        """Return the exact cover: a box has the distances nearest + n * step; every
        ``period``-th of them is allowed, or none is."""
        step = boxes.step
        nearest, farthest = boxes.q_low - boxes.k_high, boxes.q_high - boxes.k_low
        low = nearest if self.ahead is None else np.maximum(nearest, -self.ahead)
        high = farthest if self.behind is None else np.minimum(farthest, self.behind)
        common = gcd(step, self.stride)
        period = self.stride // common
        offset = -(nearest // common) * pow(step // common, -1, period) % period
        start = -((nearest - low) // step)
        first = start + (offset - start) % period
        some = (nearest % common == 0) & (first <= (high - nearest) // step)
        every = some & (low == nearest) & (high == farthest) & ((period == 1) | (nearest == farthest))
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)
