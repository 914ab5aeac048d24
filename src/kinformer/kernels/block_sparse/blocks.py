"""Blocks of a tile, computed in one product: all heads of some rows, or some heads of one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kinformer.kernels.block_sparse.plan import TermPlan
from kinformer.kernels.block_sparse.tile import Tile

PAIRS = 1 << 20  # in a block: products run at full speed, and its passes stay in the caches
_SINGLE = 1 << 16  # of one head, from which on its operations are not kept waiting by their calls


class HeadBlock(NamedTuple):
    """A slice ``n`` of a tile's rows x heads that one product computes, and which heads of each row they are."""

    n: slice
    heads: slice
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """The tiles of ``plan`` for ``rows`` rows of ``heads`` key heads, each of which ``group`` query heads share.

    ``reaches``: for each head the distance from which on keys need not be looked at. ``pairs``: how many a block has
    at most.
    """

    plan: TermPlan
    rows: int
    heads: int
    group: int
    reaches: Sequence[int] | None = None
    pairs: int = PAIRS

    def largest(self) -> int:
        """Return the number of pairs of the largest block."""
        return max((self._step(tile) * self._pairs(tile) for tile in self.plan.tiles), default=0)

    def __iter__(self) -> Iterator[tuple[Tile, HeadBlock]]:
        for whole in self.plan.tiles:
            for n, heads in self._slices(whole):
                tile = (
                    whole if self.reaches is None or not whole.includes_self else whole.within(max(self.reaches[heads]))
                )
                count = heads.stop - heads.start
                size = self.plan.stride, self.group, tile.last - tile.first, tile.width
                yield tile, HeadBlock(n, heads, ((n.stop - n.start) // (count * self.plan.stride), count, *size))

    def _pairs(self, tile: Tile) -> int:
        return self.group * (tile.last - tile.first) * tile.width

    def _step(self, tile: Tile) -> int:
        """Return how many rows x heads of a tile make one block: a single head where heads reach unlike far."""
        pairs = self._pairs(tile) * self.plan.stride
        if self.reaches is not None and pairs >= _SINGLE:
            return self.plan.stride
        fit = max(1, self.pairs // pairs)
        return self.plan.stride * min(
            fit // self.heads * self.heads if fit >= self.heads else fit, self.rows * self.heads
        )

    def _slices(self, tile: Tile) -> Iterator[tuple[slice, slice]]:
        classes, heads = self.plan.stride, self.heads
        step, total = self._step(tile) // classes, self.rows * heads
        low = 0
        while low < total:
            head = low % heads
            high = min(low + step, low - head + heads if step < heads else total)
            yield slice(low * classes, high * classes), slice(head, head + min(heads, high - low))
            low = high
