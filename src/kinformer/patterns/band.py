"""Pairs by their distance alone: the shape from which causal, full and local patterns are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Pattern


@dataclass(frozen=True)
class Band(Pattern):
    """-ahead <= q - k <= behind, where None bounds nothing."""

    behind: int | None = None  # type: ignore[misc]
    ahead: int | None = 0  # type: ignore[misc]

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        seen = distance == distance if self.behind is None else distance <= self.behind
        return seen if self.ahead is None else seen & (distance >= -self.ahead)

    def cover(self, boxes: Boxes) -> Cover:
        nearest, farthest = boxes.q_low - boxes.k_high, boxes.q_high - boxes.k_low
        behind = np.inf if self.behind is None else self.behind
        ahead = np.inf if self.ahead is None else self.ahead
        some = (nearest <= behind) & (farthest >= -ahead)
        every = (farthest <= behind) & (nearest >= -ahead)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)
