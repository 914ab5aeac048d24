"""Patterns that are defined block of queries by block of queries: their covers, and those that choose key blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Pattern

MOST_BLOCKS = 256
"""A box of more query blocks than these is SOME; the executor's boxes are at most 128 queries tall."""

Numbers = TypeVar("Numbers", Tensor, Ints)


def by_query_block(boxes: Boxes, block: int, rule: Callable[[Boxes], Cover]) -> Cover:
    """Return the cover of ``boxes`` from ``rule``'s covers of their parts, each
    of which has queries of one block only."""
    q_low, q_high, k_low, k_high, step = boxes
    if step <= block:
        count = q_high // block - q_low // block + 1
    else:
        count = (q_high - q_low) // step + 1
    lowest, highest = np.full(len(q_low), ALL, np.int8), np.full(len(q_low), NONE, np.int8)
    for number in range(min(int(count.max(initial=0)), MOST_BLOCKS)):
        still = np.flatnonzero((count > number) & ((lowest == ALL) | (highest == NONE)))
        low, high = q_low[still], q_high[still]
        if step <= block:
            start = (low // block + number) * block
            high = low + (np.minimum(high, start + block - 1) - low) // step * step
            low = low + (-((low - start) // step)).clip(0) * step
        else:
            low = high = low + number * step
        intervals = rule(Boxes(low, high, k_low[still], k_high[still], step))
        lowest[still] = np.minimum(lowest[still], intervals)
        highest[still] = np.maximum(highest[still], intervals)
    return np.where((lowest == highest) & (count <= MOST_BLOCKS), lowest, SOME).astype(np.int8)


class ChosenBlocks(Pattern):
    """A pattern over blocks of ``block`` positions, in which the queries of a block see the same few blocks of keys."""

    block: int

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        """Return the key blocks that each of the query ``blocks`` sees, one array per choice; -1 chooses nothing."""
        raise NotImplementedError

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        keys = k // self.block
        first, *others = self.choices(q // self.block)
        seen = keys == first
        for choice in others:
            seen = seen | (keys == choice)
        return seen

    def cover(self, boxes: Boxes) -> Cover:
        if not len(boxes.q_low):
            return np.zeros(0, np.int8)
        origin = int(boxes.q_low.min()) // self.block
        table = np.stack(self.choices(np.arange(origin, int(boxes.q_high.max()) // self.block + 1)))

        def rule(part: Boxes) -> Cover:
            chosen = table[:, part.q_low // self.block - origin]
            low = part.k_low + (-((part.k_low - chosen * self.block) // part.step)).clip(0) * part.step
            some = low <= np.minimum(part.k_high, chosen * self.block + self.block - 1)
            every = (part.k_low // self.block == chosen) & (part.k_high // self.block == chosen)
            return np.where(every.any(0), ALL, np.where(some.any(0), SOME, NONE)).astype(np.int8)

        return by_query_block(boxes, self.block, rule)
