"""The memories of a sequence while a chunk passes: queries search segment by segment, and recent memories are evicted
in larger blocks.

A query sees the memories of earlier segments. Memories up to the last multiple of ``batch_of`` positions are moved to
separate tensors, which are copied only when the next part joins them. The other memories are still among the recent
ones. All boundaries are multiples of positions, so results do not depend on how the sequence is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.lookup import MemorySlice, Search, gathered, look_up


class StoreSizes(NamedTuple):
    """The sizes ``segment``, ``memory_size`` and ``batch_of`` in positions: the first divides the others."""

    segment: int
    memory_size: int
    batch_of: int


class Evicted(NamedTuple):
    """Memories that left the window: ``k``, ``v`` [batch, heads, memories, head_dim], right-aligned."""

    k: Tensor
    v: Tensor

    def last(self, keep: int) -> Evicted:
        """Return the last ``keep`` memories."""
        if self.k.shape[2] <= keep:
            return self
        return Evicted(*(item[:, :, item.shape[2] - keep :] for item in self))


class Subsequence(NamedTuple):
    """Tokens ``begin .. end`` of a chunk, of one sequence: the first has ``position``; ``past``: the sequence began
    before the chunk."""

    begin: int
    end: int
    position: int
    past: bool


class Store:
    """The memories of rows whose sequences begin and end at the same tokens of a chunk.

    ``evicted``: memories that left the window; ``fresh``: keys and values [batch, heads, past + time, head_dim] of the
    window and the chunk; ``seen``: the number of tokens before the chunk.
    """

    def __init__(
        self, rules: StoreSizes, search: Search, evicted: Evicted, seen: int, fresh: tuple[Tensor, Tensor], time: int
    ) -> None:
        self.rules, self.search, self.fresh, self.past = rules, search, fresh, fresh[0].shape[2] - time
        self.evicted = evicted.last(min(seen // rules.batch_of * rules.batch_of, rules.memory_size))

    def absorb(self, q: Tensor, scaled: Tensor, runs: list[Subsequence]) -> Tensor:
        """Return the attention of queries [batch, heads, time, head_dim] to their memories, 0 outside of the
        runs: ``q`` searches, ``scaled`` attends."""
        outputs = []
        for run in runs:
            if not run.past:
                self.evicted = self.evicted.last(0)
            end = run.position + run.end - run.begin
            for begin, stop in _cut(run.position, end, self.rules.segment):
                queries = slice(run.begin + begin - run.position, run.begin + stop - run.position)
                outputs.append(self._find(q[:, :, queries], scaled[:, :, queries], begin, run))
                if stop % self.rules.batch_of == 0:
                    self._evict(stop, run)
        empty = q.shape[2] - sum(y.shape[2] for y in outputs)
        return torch.cat([*outputs, q.new_zeros(*q.shape[:2], empty, q.shape[3])], dim=2)

    def _find(self, q: Tensor, scaled: Tensor, position: int, run: Subsequence) -> Tensor:
        last = position // self.rules.segment * self.rules.segment
        first = max(0, last - self.rules.memory_size)
        border = position // self.rules.batch_of * self.rules.batch_of
        k, v = self.evicted
        pieces = [
            MemorySlice(k, v, k.shape[2] - (border - first), border - first),
            MemorySlice(*self.fresh, self._slot(border, run), last - border),
        ]
        keys, values = gathered(look_up(q, pieces, self.search), pieces)
        return attention(scaled, keys, values, Visibility(), Scoring(1.0), impl=self.search.impl).out

    def _evict(self, stop: int, run: Subsequence) -> None:
        part = self.rules.batch_of
        first, old = self._slot(stop - part, run), self.evicted.last(self.rules.memory_size - part)
        new = (item[:, :, first : first + part].to(old.k.dtype) for item in self.fresh)
        self.evicted = Evicted(*(torch.cat(item, dim=2) for item in zip(old, new, strict=True)))

    def _slot(self, position: int, run: Subsequence) -> int:
        """Return the slot of a position of the run among the fresh memories."""
        return self.past + run.begin + position - run.position


def join(rows: list[Tensor]) -> Tensor:
    """Join rows [batch, heads, slots, width] with different numbers of right-aligned slots into one tensor."""
    if len(rows) == 1:
        return rows[0]
    longest = max(row.shape[2] for row in rows)
    return torch.cat([pad(row, (0, 0, longest - row.shape[2], 0)) for row in rows])


def _cut(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield parts of ``begin .. end`` that end at multiples of ``size``."""
    while begin < end:
        stop = min(end, (begin // size + 1) * size)
        yield begin, stop
        begin = stop
