"""Positions in blocks: a query sees its own block and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True)
class Blocks(Pattern):
    """The pairs with -front <= q // block - k // block <= back; with ``back =
    front = 0`` the tokens of the same block."""

    block: int
    back: int = 0
    front: int = 0

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config; the pattern is two-sided within a block, so a decoder takes
        it in an ``intersection`` with ``causal``."""

        kind = "blocks"
        block: int = 128
        back: int = 0
        front: int = 0

        def __post_init__(self) -> None:
            if self.block < 1:
                raise KinformerError(f"block must be 1 token or more, but is {self.block}.")
            for name in ("back", "front"):
                if getattr(self, name) < 0:
                    raise KinformerError(f"{name} must be 0 blocks or more, but is {getattr(self, name)}.")

        def build(self) -> Blocks:
            return Blocks(self.block, self.back, self.front)

    @property
    def behind(self) -> int:  # type: ignore[override]
        return (self.back + 1) * self.block - 1

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return (self.front + 1) * self.block - 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        blocks = q // self.block - k // self.block
        return (blocks <= self.back) & (blocks >= -self.front)

    def cover(self, boxes: Boxes) -> Cover:
        q_low, q_high, k_low, k_high = (side // self.block for side in boxes[:4])
        some = (q_low - k_high <= self.back) & (q_high - k_low >= -self.front)
        every = (q_high - k_low <= self.back) & (q_low - k_high >= -self.front)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)
