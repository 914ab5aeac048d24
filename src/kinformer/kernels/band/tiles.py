"""Tiles of attention over a band of distances, and the masks of pairs on their edges.

Query i sees key j where -ahead <= i - j <= behind: a tile of queries first .. last sees the slots first - behind ..
last + ahead, and only pairs at its two slanted edges need a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kinformer.kernels.softmax.request import Visibility


class BandTile(NamedTuple):
    """The pairs of some kv heads, queries and slots, stored as [heads, slots, group * queries].

    Only the first ``late`` slots may lie before what a query sees, only those from ``early`` on after it.
    """

    heads: slice
    queries: slice
    slots: slice
    late: int
    early: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(part.stop - part.start for part in (self.heads, self.slots, self.queries))


def limits(visibility: Visibility, time: int, slots: int) -> tuple[int, int]:
    """Return ``(behind, ahead)`` as numbers for ``time`` queries at the last of
    ``slots`` slots, with all slots for None."""
    assert visibility.pattern is not None and visibility.pattern.band is not None
    behind, ahead = visibility.pattern.band
    return slots if behind is None else min(behind, slots), slots if ahead is None else min(ahead, slots)


def interval(visibility: Visibility, time: int, slots: int) -> tuple[int, int]:
    """Return the half-open interval of slots that at least one of the queries sees."""
    behind, ahead = limits(visibility, time, slots)
    first = max(0, slots - time - behind)
    return first, max(first, min(slots, slots + ahead))


@dataclass(frozen=True)
class Layout:
    """The sizes of one call; ``first`` [batch, time] is each query's first visible slot where rows differ."""

    heads: int
    kv_heads: int
    group: int
    time: int
    past: int
    behind: int
    ahead: int
    first: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, behind: int, ahead: int, lookback: Tensor | None) -> Layout:
        batch, q_heads, time, _ = q.shape
        kv_heads, past = k.shape[1], k.shape[2] - time
        first = None
        if lookback is not None:
            first = past + torch.arange(time, device=q.device) - lookback.clamp(max=behind)
        return cls(batch * kv_heads, kv_heads, q_heads // kv_heads, time, past, behind, ahead, first)

    def tiles(self, rows: int, pairs: int) -> Iterator[BandTile]:
        """Yield all tiles with something to see: ``rows`` queries each, and as many heads as fit into ``pairs``."""
        widest = min(self.past + self.time, self.behind + self.ahead + rows)
        heads = max(1, min(self.heads, pairs // (self.group * min(rows, self.time) * widest)))
        for head in range(0, self.heads, heads):
            for query in range(0, self.time, rows):
                yield self._tile(slice(head, min(head + heads, self.heads)), slice(query, min(query + rows, self.time)))

    def _tile(self, heads: slice, queries: slice) -> BandTile:
        newest = self.past + queries.stop - 1
        start, clear = self._firsts(heads, queries)
        start = min(max(0, start), newest + 1)
        stop = max(start, min(self.past + self.time, newest + 1 + self.ahead))
        width = stop - start
        late = min(max(0, clear - start), width)
        early = min(max(0, self.past + queries.start + self.ahead + 1 - start), width)
        return BandTile(heads, queries, slice(start, stop), late, early)

    def _firsts(self, heads: slice, queries: slice) -> tuple[int, int]:
        """Return the first slot that some query of a tile sees, and the first one from which all may.

        Rows of different lookback are read on a CPU only; elsewhere that would wait for the device.
        """
        oldest, newest = self.past + queries.start, self.past + queries.stop - 1
        if self.first is None:
            return oldest - self.behind, newest - self.behind
        # Reading a number off a GPU waits for it: take the widest tile and let the mask decide.
        if self.first.device.type != "cpu":
            return oldest - self.behind, self.past + self.time
        low, high = self.first[self.rows(heads), queries].aminmax()
        return int(low), int(high)

    def rows(self, heads: slice) -> slice:
        """Return the batch rows that these heads belong to."""
        return slice(heads.start // self.kv_heads, (heads.stop - 1) // self.kv_heads + 1)

    def mask(self, scores: Tensor, tile: BandTile) -> None:
        """Set the scores [heads, slots, group * queries] of pairs that do not see each other to -inf, in place.

        Added rather than filled: several times faster on a CPU.
        """
        heads, slots, queries = tile.shape
        scores = scores.view(heads, slots, self.group, queries)
        diagonal = tile.slots.start - self.past - tile.queries.start
        if tile.late and self.first is not None:
            scores[:, : tile.late].add_(self._ragged_mask(scores, tile)[:, :, None])
        elif tile.late:
            mask = scores.new_full((tile.late, queries), -torch.inf).triu_(diagonal + self.behind + 1)
            scores[:, : tile.late].add_(mask[:, None])
        if tile.early < slots:
            mask = scores.new_full((slots - tile.early, queries), -torch.inf)
            mask.tril_(diagonal + tile.early - self.ahead - 1)
            scores[:, tile.early :].add_(mask[:, None])

    def _ragged_mask(self, scores: Tensor, tile: BandTile) -> Tensor:
        """Return -inf on slots before each query's first, else 0, [heads, late, queries]."""
        assert self.first is not None
        rows = self.rows(tile.heads)
        slots = torch.arange(tile.slots.start, tile.slots.start + tile.late, device=scores.device)
        hidden = slots[:, None] < self.first[rows, None, tile.queries]
        mask = scores.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        row_of_head = torch.arange(tile.heads.start, tile.heads.stop, device=scores.device) // self.kv_heads
        return mask[row_of_head - rows.start]
