"""The plan of a pattern over an interval of positions: tiles of queries with just the keys that they see.

It never looks at all pairs. Boxes of (a tile's queries) x (an interval of keys) are split until the pattern's ``cover``
calls them empty or full, or until they are ``_LEAF`` keys wide; only in those is every pair looked at. A term of the
pattern whose distances are multiples of a stride is worked on class by class (positions of equal remainder), where its
keys are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Pattern, Term
from kinformer.kernels.block_sparse.tile import DistanceRun, PartialMask, Tile

_LEAF = 16
ROWS = (128, 64, 32, 16)
_OVERHEAD = 24  # queries' worth of reading keys (measured on a CPU)
_GAP = 32  # visible keys that a mask may hold between hidden ones


class Interval(NamedTuple):
    """Queries at positions ``query .. stop`` and keys at positions ``key .. stop``; key <= query."""

    key: int
    query: int
    stop: int


@dataclass(frozen=True)
class TermPlan:
    """The tiles of one term of a pattern.

    Unit u of class c is position u * stride + c; ``origin`` and ``query_origin`` are the units of the first key and
    query, ``units`` and ``query_units`` the numbers of units from there on.
    """

    stride: int
    origin: int
    query_origin: int
    units: int
    query_units: int
    rows: int
    tiles: tuple[Tile, ...]
    computed: int
    attended: int

    @property
    def stacked(self) -> bool:
        """Return whether each head of a tile has keys of its own."""
        return any(isinstance(tile.keys, Tensor) and tile.keys.dim() == 2 for tile in self.tiles[:1])

    def on(self, device: torch.device) -> TermPlan:
        """Return the plan with its keys and masks on ``device``; equal masks stay one tensor."""
        placed: dict[int, Tensor] = {}

        def place(x: Tensor) -> Tensor:
            if id(x) not in placed:
                placed[id(x)] = x.to(device)
            return placed[id(x)]

        tiles = tuple(
            tile._replace(
                keys=tile.keys if isinstance(tile.keys, slice) else place(tile.keys),
                masks=tuple(mask._replace(values=place(mask.values)) for mask in tile.masks),
            )
            for tile in self.tiles
        )
        return replace(self, tiles=tiles)


@lru_cache(maxsize=256)
def plan(pattern: Pattern, interval: Interval, newest_first: bool = False) -> tuple[TermPlan, ...]:
    """Return one plan per term of ``pattern``, each cut into tiles of the height that costs least.

    ``newest_first``: tiles address the keys, and hold their own, in reversed order.
    """
    # Of real numbers on the CPU, whatever the default device, also where costs are counted on imitations.
    with _disable_current_modes(), torch.device("cpu"):
        return tuple(_planned(term, interval, newest_first) for term in pattern.terms())


def _planned(term: Term, interval: Interval, newest_first: bool) -> TermPlan:
    """Return the cheapest plan. Tall tiles compute more hidden pairs, low ones cost more per pair:
    go down from the tallest while it pays."""
    best: TermPlan | None = None
    for rows in ROWS:
        planned = Cutter(term, interval, rows, newest_first).plan()
        # Taken to have one minimum over the heights, so the first rise of the cost ends the search.
        if best is not None and cost(planned) > cost(best):
            break
        best = planned
    assert best is not None
    return best


def cost(plan: TermPlan) -> float:
    """Return the cost of the products in pairs: a tile reads its keys once, whatever the number of its queries."""
    return plan.computed * (1 + _OVERHEAD / plan.rows)


class _Leaves(NamedTuple):
    """The intervals of key units [low, high) by tile number, sorted; ``full`` says that every pair is allowed."""

    tile: Ints
    low: Ints
    high: Ints
    full: np.ndarray


class Cutter:
    """The cutter of one term into tiles of ``rows`` query units, aligned to absolute positions."""

    def __init__(self, term: Term, interval: Interval, rows: int, newest_first: bool) -> None:
        self.pattern, self.stride = term
        self.interval, self.rows, self.newest_first = interval, rows, newest_first
        stride = self.stride
        self.origin, self.query_origin = interval.key // stride, interval.query // stride
        self.end = (interval.stop - 1) // stride + 1
        edges = np.arange(self.query_origin // rows, -(-self.end // rows) + 1) * rows
        edges = edges.clip(self.query_origin, self.end)
        self.first, self.last = edges[:-1], edges[1:]
        self.classes = np.arange(stride)
        self.masks_by_bytes: dict[bytes, Tensor] = {}
        self.computed = self.attended = 0

    def plan(self) -> TermPlan:
        tiles = tuple(self._tiles())
        origins = self.origin, self.query_origin
        units = self.end - self.origin, self.end - self.query_origin
        return TermPlan(self.stride, *origins, *units, self.rows, tiles, self.computed, self.attended)

    def _tiles(self) -> Iterator[Tile]:
        leaves = self._leaves()
        bounds = np.searchsorted(leaves.tile, np.arange(len(self.first) + 1))
        for number, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if start < stop:
                tile = self._tile(number, _Leaves(*(column[start:stop] for column in leaves)))
                if tile.width:
                    yield tile

    def _leaves(self) -> _Leaves:
        """Split the key axis of every tile until boxes are empty, full or small."""
        number, low, high = self._roots()
        leaves: list[tuple[Ints, Ints, Ints, np.ndarray]] = []
        while len(number):
            cover = self._cover(number, low, high)
            small = high - low <= _LEAF
            done = (cover == ALL) | ((cover == SOME) & small)
            leaves.append((number[done], low[done], high[done], cover[done] == ALL))
            split = (cover == SOME) & ~small
            number, low, high = number[split], low[split], high[split]
            middle = low + (high - low) // 2
            number, low, high = (np.concatenate(pair) for pair in ((number, number), (low, middle), (middle, high)))
        columns = [np.concatenate(column) for column in zip(*leaves, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        return _Leaves(*(column[order] for column in columns))

    def _roots(self) -> tuple[Ints, Ints, Ints]:
        """Return for every tile the aligned power-of-two intervals of keys that its pattern's bounds leave."""
        behind, ahead = self.pattern.behind, self.pattern.ahead
        low = np.full(len(self.first), self.origin)
        high = np.full(len(self.first), self.end)
        if behind is not None:
            low = np.maximum(low, self.first - behind // self.stride - 1)
        if ahead is not None:
            high = np.minimum(high, self.last + ahead // self.stride + 1)
        size = _LEAF
        while size < (high - low).max(initial=1):
            size *= 2
        roots = [(i, b * size) for i in range(len(low)) for b in range(low[i] // size, (high[i] - 1) // size + 1)]
        number, start = np.array(roots, dtype=np.int64).reshape(-1, 2).T
        return number, start, start + size

    def _cover(self, number: Ints, low: Ints, high: Ints) -> Cover:
        """Return the cover of boxes over all classes; keys outside the interval count as hidden."""
        first, last = self.first[number], self.last[number] - 1
        if self.stride == 1:
            cover = self.pattern.cover(Boxes(first, last, low, high - 1))
            inside = (low >= self.interval.key) & (high <= self.interval.stop)
            outside = (high <= self.interval.key) | (low >= self.interval.stop)
        else:
            sides = ((side[:, None] * self.stride + self.classes).ravel() for side in (first, last, low, high - 1))
            boxes = Boxes(*sides, self.stride)  # type: ignore[arg-type,call-arg]
            by_class = self.pattern.cover(boxes).reshape(-1, self.stride)
            same = by_class.min(1) == by_class.max(1)
            cover = np.where(same, by_class[:, 0], SOME)
            inside = (low * self.stride >= self.interval.key) & (high * self.stride <= self.interval.stop)
            outside = (high <= self.origin) | (low >= self.end)
        return np.where(outside, NONE, np.where(inside, cover, np.minimum(cover, SOME))).astype(np.int8)

    def _tile(self, number: int, leaves: _Leaves) -> Tile:
        first, last = int(self.first[number]), int(self.last[number])
        keys = np.concatenate([np.arange(a, b) for a, b in zip(leaves.low, leaves.high, strict=True)])
        partial = np.repeat(~leaves.full, leaves.high - leaves.low)
        hidden = self._hidden(first, last, keys[partial])
        seen = np.ones(len(keys), dtype=bool)
        seen[partial] = ~hidden.all((0, 1))
        hidden = hidden[..., seen[partial]]
        keys, partial = keys[seen], partial[seen]
        self._count(first, last, len(keys), hidden)
        sees_itself = self.newest_first and self._sees_itself(first, last, keys, partial, hidden)
        if self.newest_first:
            keys, partial, hidden = keys[::-1], partial[::-1], hidden[..., ::-1]
        edge = np.zeros(len(keys), dtype=bool)
        edge[partial] = hidden.any((0, 1))
        index = np.cumsum(partial) - 1
        masks = tuple(
            PartialMask(start, stop, self._mask(hidden, partial[start:stop], index[start:stop]))
            for start, stop in runs_of(edge)
        )
        runs = tuple(DistanceRun(start, stop, first - int(keys[start])) for start, stop in _neighbours(keys))
        slots = self.end - 1 - keys if self.newest_first else keys - self.origin
        queries = first - self.query_origin, last - self.query_origin
        return Tile(*queries, _addresses(slots), len(keys), masks, runs, sees_itself and len(runs) == 1)

    def _sees_itself(self, first: int, last: int, keys: Ints, partial: np.ndarray, hidden: np.ndarray) -> bool:
        """Return whether each of the tile's queries sees the key at its own position."""
        if self.stride > 1 or not len(keys):
            return False
        queries = np.arange(first, last)
        place = np.searchsorted(keys, queries).clip(max=len(keys) - 1)
        unsure = partial[place]
        seen = ~hidden[0, unsure.nonzero()[0], (np.cumsum(partial) - 1)[place[unsure]]]
        return bool((keys[place] == queries).all() and seen.all())

    def _hidden(self, first: int, last: int, keys: Ints) -> np.ndarray:
        """Return which pairs are hidden, [classes or 1, rows, keys]; queries outside the
        interval see all, since nobody uses them."""
        if not len(keys):
            return np.zeros((1, last - first, 0), dtype=bool)
        classes = torch.arange(self.stride)[:, None, None]
        q = torch.arange(first, last)[:, None] * self.stride + classes
        k = torch.from_numpy(keys) * self.stride + classes
        seen = self.pattern.allowed(q, k)
        if self.stride > 1:
            seen = seen | (q < self.interval.query) | (q >= self.interval.stop)
        seen = seen & (k >= self.interval.key) & (k < self.interval.stop)
        hidden = (~seen).expand(self.stride, last - first, len(keys)).numpy()
        return hidden[:1] if (hidden == hidden[:1]).all() else hidden

    def _mask(self, hidden: np.ndarray, partial: np.ndarray, index: Ints) -> Tensor:
        """Return the additive mask of a run of keys; equal masks are one tensor."""
        run = np.zeros((*hidden.shape[:2], len(partial)), dtype=bool)
        run[..., partial] = hidden[..., index[partial]]
        name = bytes(str(run.shape), "ascii") + np.packbits(run).tobytes()
        if name not in self.masks_by_bytes:
            self.masks_by_bytes[name] = torch.zeros(run.shape).masked_fill_(torch.from_numpy(run), -torch.inf)
        return self.masks_by_bytes[name]

    def _count(self, first: int, last: int, width: int, hidden: np.ndarray) -> None:
        positions = np.arange(first, last) * self.stride + self.classes[:, None]
        inside = (positions >= self.interval.query) & (positions < self.interval.stop)
        self.computed += positions.size * width
        self.attended += int(((width - hidden.sum(-1)) * inside).sum())


def runs_of(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield intervals that hold all set flags; small gaps are bridged."""
    indices = np.flatnonzero(flags)
    if not len(indices):
        return
    breaks = np.flatnonzero(np.diff(indices) > _GAP)
    starts = indices[np.concatenate(([0], breaks + 1))]
    stops = indices[np.concatenate((breaks, [len(indices) - 1]))] + 1
    yield from zip(starts.tolist(), stops.tolist(), strict=True)


def _neighbours(keys: Ints) -> Iterator[tuple[int, int]]:
    """Yield the intervals of consecutive keys."""
    edges = [0, *(np.flatnonzero(np.abs(np.diff(keys)) > 1) + 1).tolist(), len(keys)]
    return ((start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True) if start < stop)


def _addresses(keys: Ints) -> slice | Tensor:
    if not len(keys) or keys[-1] - keys[0] + 1 == len(keys):
        return slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(0, 0)
    return torch.from_numpy(np.ascontiguousarray(keys))
