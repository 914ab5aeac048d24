"""The plan of a pattern over an interval of positions: tiles of queries with just the keys that they see.

The planner never tests all pairs. It splits boxes of (a tile's queries) x (an interval of keys) until the pattern's
``cover`` calls them empty or full, or until they are ``_LEAF`` keys wide. It tests every pair only in these leaves. If
the distances of a term of the pattern are multiples of a stride, the term is planned class by class (positions of equal
remainder), because its keys are contiguous there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from kinformer.core.pattern import ALL, NONE, SOME, Boxes, Cover, Ints, Pattern, Term

# One tile of a plan: some queries, the keys that they see, and a mask of the hidden pairs.


class PartialMask(NamedTuple):
    """The additive mask of the tile's keys ``start .. stop``: -inf for hidden pairs, else 0.

    ``values`` are [classes or 1, rows, keys], or [heads, 1, rows, keys] where heads are stacked.
    """

    start: int
    stop: int
    values: Tensor


class DistanceRun(NamedTuple):
    """A run of neighbouring keys of a tile, ``start .. stop``; the query in the tile's first row is ``ahead`` units
    after the first key. With the newest key first, element (i, j) of a run has the unit distance ahead + i + j."""

    start: int
    stop: int
    ahead: int


class Tile(NamedTuple):
    """Queries ``first .. last`` (units from the first query's) and their keys: a slice, an index [width], or [heads,
    width] where heads are stacked.

    ``includes_self``: keys run newest first, and each query's key is among them.
    """

    first: int
    last: int
    keys: slice | Tensor
    width: int
    masks: tuple[PartialMask, ...]
    runs: tuple[DistanceRun, ...]
    includes_self: bool = False

    def within(self, reach: int) -> Tile:
        """Return the tile without keys at least ``reach`` units behind all its queries; needs ``includes_self``."""
        width = reach - self.runs[0].ahead
        if width >= self.width or not isinstance(self.keys, slice):
            return self
        masks = (
            PartialMask(start, min(stop, width), values[..., : width - start])
            for start, stop, values in self.masks
            if start < width
        )
        keys = slice(self.keys.start, self.keys.start + width)
        runs = (self.runs[0]._replace(stop=width),)
        return self._replace(keys=keys, width=width, masks=tuple(masks), runs=runs)


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
        """Return whether the heads of a tile have different keys."""
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
    """Return the cheapest plan, down from the tallest tiles: tall ones hide more pairs, low ones cost more a pair."""
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
        masks = []
        for start, stop in runs_of(edge):
            inside, at = partial[start:stop], index[start:stop]
            run = np.zeros((*hidden.shape[:2], stop - start), dtype=bool)
            run[..., inside] = hidden[..., at[inside]]
            masks.append(PartialMask(start, stop, _additive(run, self.masks_by_bytes)))
        runs = tuple(DistanceRun(start, stop, first - int(keys[start])) for start, stop in _neighbours(keys))
        slots = self.end - 1 - keys if self.newest_first else keys - self.origin
        queries = first - self.query_origin, last - self.query_origin
        return Tile(*queries, _addresses(slots), len(keys), tuple(masks), runs, sees_itself and len(runs) == 1)

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
        """Return which pairs are hidden, [classes or 1, rows, keys]; queries outside the interval see all."""
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

    def _count(self, first: int, last: int, width: int, hidden: np.ndarray) -> None:
        positions = np.arange(first, last) * self.stride + self.classes[:, None]
        inside = (positions >= self.interval.query) & (positions < self.interval.stop)
        self.computed += positions.size * width
        self.attended += int(((width - hidden.sum(-1)) * inside).sum())


def _additive(hidden: np.ndarray, masks: dict[bytes, Tensor]) -> Tensor:
    """Return the mask of a run of keys, -inf for ``hidden`` pairs, else 0; equal masks are one tensor."""
    name = bytes(str(hidden.shape), "ascii") + np.packbits(hidden).tobytes()
    if name not in masks:
        masks[name] = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    return masks[name]


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


# Tiles for heads of different patterns together: the same queries of all heads, and other keys for each.
#
# A plan per head would make eight times as many products for eight heads, each so small that calling it costs more
# than the work. Keys are gathered head by head anyway where they are not contiguous; shorter rows of keys are padded
# with hidden keys.

_WASTE = 1.25
"""Stacked heads may compute this many times the pairs that tiles of the same height compute one by one."""


@lru_cache(maxsize=256)
def stack(pattern: Pattern, interval: Interval) -> TermPlan | None:
    """Return one plan for all heads of ``pattern``, its tiles' keys [heads, width] and masks [heads, 1, rows, keys].

    None where it does not pay: heads that see alike, terms with strides, widths that differ too much.
    """
    heads = [pattern.at(head) for head in range(pattern.num_heads or 1)]
    if len(heads) < 2 or 2 * len(set(heads)) <= len(heads):
        return None
    terms = [head.terms() for head in heads]
    if any(len(term) != 1 or term[0].stride != 1 for term in terms):
        return None
    with _disable_current_modes(), torch.device("cpu"):
        best, separate = None, 0
        for rows in ROWS:
            plans = [Cutter(term[0], interval, rows, False).plan() for term in terms]
            plan = _stacked(plans)
            if best is not None and cost(plan) > cost(best):
                break
            best, separate = plan, sum(item.computed for item in plans)
    return best if best is not None and best.computed <= _WASTE * separate else None


def _stacked(plans: Sequence[TermPlan]) -> TermPlan:
    one = plans[0]
    by_first: dict[int, list[Tile | None]] = {}
    for head, plan in enumerate(plans):
        for tile in plan.tiles:
            by_first.setdefault(tile.first, [None] * len(plans))[head] = tile
    masks: dict[bytes, Tensor] = {}
    tiles = tuple(_tile(by_first[first], masks) for first in sorted(by_first))
    computed = sum((tile.last - tile.first) * tile.width * len(plans) for tile in tiles)
    attended = sum(plan.attended for plan in plans)
    return TermPlan(1, one.origin, one.query_origin, one.units, one.query_units, one.rows, tiles, computed, attended)


def _tile(tiles: Sequence[Tile | None], masks_by_bytes: dict[bytes, Tensor]) -> Tile:
    some = next(tile for tile in tiles if tile is not None)
    width = max(tile.width for tile in tiles if tile is not None)
    rows = some.last - some.first
    keys = np.zeros((len(tiles), width), np.int64)
    hidden = np.ones((len(tiles), rows, width), bool)
    for head, tile in enumerate(tiles):
        if tile is None:
            continue
        at = np.arange(tile.keys.start, tile.keys.stop) if isinstance(tile.keys, slice) else tile.keys.numpy()
        keys[head, : tile.width] = at
        hidden[head, :, : tile.width] = False
        for mask in tile.masks:
            hidden[head, :, mask.start : mask.stop] = mask.values[0].isinf().numpy()
    masks = (
        PartialMask(start, stop, _additive(np.ascontiguousarray(hidden[:, None, :, start:stop]), masks_by_bytes))
        for start, stop in runs_of(np.asarray(hidden.any((0, 1))))
    )
    return Tile(some.first, some.last, torch.from_numpy(keys), width, tuple(masks), ())


# Splits a call into sections: rows, times and heads that one plan serves.
#
# A row with a reset in mid-chunk, a row at another position than its neighbours, and heads of another pattern each
# form a separate section. Most calls are one section.


@lru_cache(maxsize=256)
def _plans(pattern: Pattern, interval: Interval, newest_first: bool, device: torch.device) -> tuple[TermPlan, ...]:
    if pattern.num_heads is None:
        plans = plan(pattern, interval, newest_first)
    else:
        stacked = stack(pattern, interval)
        assert stacked is not None
        plans = (stacked,)
    return plans if device.type in ("cpu", "meta") else tuple(item.on(device) for item in plans)


class Section(NamedTuple):
    """The part of a call that one plan serves: ``rows`` and ``heads`` (of queries) are slices or lists; ``times`` of
    queries, ``slots`` of keys.

    Selected heads have separate keys, so ``kv_heads`` is their number.
    """

    pattern: Pattern
    interval: Interval
    rows: slice | list[int]
    times: slice
    slots: slice
    heads: slice | list[int]
    kv_heads: int

    def plans(self, newest_first: bool, device: torch.device) -> tuple[TermPlan, ...]:
        """Return the plan of every term, or one plan for all heads where heads of different patterns share tiles."""
        return _plans(self.pattern, self.interval, newest_first, device)

    def queries(self, x: Tensor) -> Tensor:
        """Return [batch, q_heads, time, ...] as [rows * kv_heads, group, time, ...], a view where possible."""
        x = x[self.rows][:, self.heads][:, :, self.times]
        return x.reshape(x.shape[0] * self.kv_heads, x.shape[1] // self.kv_heads, *x.shape[2:])

    def keys(self, x: Tensor, group: int) -> Tensor:
        """Return [batch, kv_heads, slots, ...] as [rows * kv_heads, slots, ...]."""
        x = x[self.rows]
        if isinstance(self.heads, list):
            x = x[:, [head // group for head in self.heads]]
        return x[:, :, self.slots].flatten(0, 1)

    def table(self, x: Tensor) -> Tensor:
        """Return [q_heads or 1, ...] as [kv_heads or 1, group or 1, ...]."""
        return x[None] if x.shape[0] == 1 else x[self.heads].unflatten(0, (self.kv_heads, -1))

    def add_table(self, target: Tensor, x: Tensor) -> None:
        """Add ``x``, of the shape that :meth:`table` returns, to ``target`` in place."""
        if target.shape[0] == 1:
            target += x[0]
        else:
            target[self.heads] += x.flatten(0, 1)

    def covers(self, times: slice, length: int) -> bool:
        """Return whether the section has all rows and heads, and ``times`` (of queries or keys) all of ``length``."""
        simple = isinstance(self.rows, slice) and isinstance(self.heads, slice)
        return simple and times.stop - times.start == length

    def index_in(self, target: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return the index of the section's rows and heads in ``target``, where ``group`` heads share one."""
        rows = torch.arange(target.shape[0], device="cpu")[self.rows][:, None]
        if isinstance(self.heads, slice):
            return rows, torch.arange(target.shape[1], device="cpu")
        return rows, torch.tensor(self.heads, device="cpu") // group


class Operands(NamedTuple):
    """The tensors of one section: q [n, group, time, head_dim], k, v [n, slots, ...], n = rows * heads; the words of
    dropout; ``padding`` [rows, slots] bool, True for keys that no query sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    interval: Interval
    words: tuple[Tensor, Tensor] | None = None
    p: float = 0.0
    padding: Tensor | None = None


class Whole:
    """A result [batch, heads, length, width] by query or by key, put together or summed section by section."""

    def __init__(self, like: Tensor, width: int, dtype: torch.dtype, fill: float = 0.0) -> None:
        self.shape, self.dtype, self.fill, self.like = (*like.shape[:3], width), dtype, fill, like
        self.total: Tensor | None = None

    def put(self, section: Section, x: Tensor) -> None:
        """Write ``x`` [rows * kv_heads, group, time, width], by query, to its section."""
        x = x.to(self.dtype)
        if section.covers(section.times, self.shape[2]):
            self.total = x.reshape(self.shape)
            return
        target = self.value()[:, :, section.times]
        rows, heads = section.index_in(target, 1)
        target[rows, heads] = x.reshape(len(rows), heads.shape[0], *target.shape[2:])

    def add(self, section: Section, x: Tensor, group: int) -> None:
        """Add ``x`` [rows * kv_heads, slots, width], by key, to its section."""
        if section.covers(section.slots, self.shape[2]):
            x = x.reshape(self.shape)
            self.total = x if self.total is None else self.total.add_(x)
            return
        target = self.value()[:, :, section.slots]
        rows, heads = section.index_in(target, group)
        target.index_put_((rows, heads), x.reshape(len(rows), heads.shape[0], *target.shape[2:]), accumulate=True)

    def value(self) -> Tensor:
        if self.total is None:
            self.total = self.like.new_full(self.shape, self.fill, dtype=self.dtype)
        return self.total


def sections(
    pattern: Pattern, positions: Tensor, slots: int, heads: int, kv_heads: int, separate_heads: bool
) -> Iterator[Section]:
    """Yield a call's sections, whose queries [batch, time] stand at ``positions`` and at the last of ``slots`` slots.

    Heads of different patterns are one section where that pays, unless these are to be ``separate_heads``.
    """
    for times, first, rows in _runs(positions):
        past = slots - positions.shape[1] + times.start
        oldest = max(0, past - first)
        interval = Interval(first - (past - oldest), first, first + times.stop - times.start)
        keys = slice(oldest, past + times.stop - times.start)
        if pattern.num_heads is not None and not separate_heads and stack(pattern, interval) is not None:
            every = slice(0, heads) if kv_heads == heads else list(range(heads))
            yield Section(pattern, interval, rows, times, keys, every, heads)
            continue
        for alike, group in _heads(pattern, heads):
            owners = len(group) if isinstance(group, list) else kv_heads
            yield Section(alike, interval, rows, times, keys, group, owners)


def _runs(positions: Tensor) -> Iterator[tuple[slice, int, slice | list[int]]]:
    """Yield times in which positions count up by one, the first position, and the rows for which that holds."""
    batch, time = positions.shape
    on_host = positions.cpu()
    offset = on_host - torch.arange(time, device="cpu")
    if not positions.numel():
        return
    if bool((offset == offset[0, 0]).all()):
        yield slice(0, time), int(on_host[0, 0]), slice(None)
        return
    runs: dict[tuple[int, int, int], list[int]] = {}
    for row in range(batch):
        starts = [0, *((offset[row].diff() != 0).nonzero()[:, 0] + 1).tolist(), time]
        for start, stop in zip(starts[:-1], starts[1:], strict=True):
            runs.setdefault((start, stop, int(on_host[row, start])), []).append(row)
    for (start, stop, first), rows in runs.items():
        yield slice(start, stop), first, rows


def _heads(pattern: Pattern, heads: int) -> Iterator[tuple[Pattern, slice | list[int]]]:
    alike: dict[Pattern, list[int]] = {}
    for head in range(pattern.num_heads or 1):
        alike.setdefault(pattern.at(head), []).append(head)
    for one, members in alike.items():
        yield one, slice(0, heads) if len(alike) == 1 else members


# Positions of equal remainder (residue classes) side by side: the layout in which strided patterns are contiguous.


def to_classes(x: Tensor, first: int, stride: int, origin: int, units: int, fill: float = 0.0) -> Tensor:
    """Return [n, group, time, width] as [n * stride, group, units, width], with ``fill`` at missing positions.

    ``x`` begins at position ``first``; unit u of class c holds position (origin + u) * stride + c.
    """
    if stride == 1:
        return x
    n, group, time, width = x.shape
    before = first - origin * stride
    x = functional.pad(x, (0, 0, before, units * stride - before - time), value=fill)
    return x.view(n, group, units, stride, width).permute(0, 3, 1, 2, 4).reshape(n * stride, group, units, width)


def from_classes(x: Tensor, first: int, stride: int, origin: int, time: int) -> Tensor:
    """Invert :func:`to_classes`: [n * stride, group, units, width] -> [n, group, time, width]."""
    if stride == 1:
        return x
    classes, group, units, width = x.shape
    before = first - origin * stride
    x = x.view(classes // stride, stride, group, units, width).permute(0, 2, 3, 1, 4)
    return x.reshape(classes // stride, group, units * stride, width)[:, :, before : before + time]
