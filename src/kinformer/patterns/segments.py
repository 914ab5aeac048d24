"""Segments with a memory (Dai et al. 2019, Transformer-XL): a token sees its own segment up to itself, and the last
tokens before that segment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Pattern
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True)
class Segments(Pattern):
    """The pairs with start(q) - memory <= k <= q, start(q) = segment * (q // segment); not ``same_segment``: k <
    start(q) too."""

    segment: int
    memory: int
    same_segment: bool = True

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "segments"
        segment: int = 128
        memory: int = 128

        def __post_init__(self) -> None:
            check_sizes(self.segment, self.memory)

        def build(self) -> Segments:
            return Segments(self.segment, self.memory)

    @property
    def behind(self) -> int:  # type: ignore[override]
        return self.memory + self.segment - 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        start = q // self.segment * self.segment
        return (k >= start - self.memory) & (k <= q if self.same_segment else k < start)

    def cover(self, boxes: Boxes) -> Cover:
        first, last = (side // self.segment * self.segment for side in boxes[:2])
        earliest, latest = (boxes.q_low, boxes.q_high) if self.same_segment else (first - 1, last - 1)
        some = (boxes.k_high >= first - self.memory) & (boxes.k_low <= latest)
        every = (boxes.k_low >= last - self.memory) & (boxes.k_high <= earliest)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


def check_sizes(segment: int, memory: int) -> None:
    """Refuse sizes that mean nothing."""
    if segment < 1:
        raise KinformerError(f"segment must be 1 token or more, but is {segment}.")
    if memory < 0:
        raise KinformerError(f"memory must be 0 tokens (none) or more, but is {memory}.")
