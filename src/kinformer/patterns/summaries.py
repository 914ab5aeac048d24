"""Summary columns of the Sparse Transformer (Child et al. 2019, section 4.3): the same few keys of every segment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Pattern
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


@dataclass(frozen=True)
class Summaries(Pattern):
    """The pairs with low <= k mod segment < high, for every query."""

    segment: int
    low: int
    high: int

    ahead = None

    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        """The config: ``summary`` keys of every ``segment``, the last ones, or with ``skip`` those that end this many
        slices before.

        All queries see them: a decoder takes it in an ``intersection`` with ``causal``.
        """

        kind = "summaries"
        segment: int = 128
        summary: int = 8
        skip: int = 0

        def __post_init__(self) -> None:
            if self.summary < 1 or self.skip < 0 or (self.skip + 1) * self.summary > self.segment:
                raise KinformerError(
                    f"a slice of {plural(self.summary, 'key')} after {self.skip} others, from the end, does not fit "
                    f"into a segment of {self.segment}; choose a smaller summary or skip."
                )

        def build(self) -> Summaries:
            high = self.segment - self.skip * self.summary
            return Summaries(self.segment, high - self.summary, high)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        offset = k % self.segment
        return ((offset >= self.low) & (offset < self.high)) | (q != q)

    def cover(self, boxes: Boxes) -> Cover:
        step = boxes.step
        if step % self.segment == 0:
            offset = boxes.k_low % self.segment
            return np.where((offset >= self.low) & (offset < self.high), ALL, NONE).astype(np.int8)
        count = self._below(boxes.k_high + 1) - self._below(boxes.k_low)
        every = count == boxes.k_high - boxes.k_low + 1
        return np.where(every, ALL, np.where(count > 0, SOME, NONE)).astype(np.int8)

    def _below(self, end: Ints) -> Ints:
        """Return how many summary keys lie before ``end``."""
        return end // self.segment * (self.high - self.low) + (end % self.segment - self.low).clip(
            0, self.high - self.low
        )
