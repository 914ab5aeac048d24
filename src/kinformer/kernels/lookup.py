"""Search for the best of many memories, and attention to the chosen ones (Wu et al. 2022).

A memory is the key and value of an earlier position; a query may see a range of memories. A search returns ``topk``
memories:

    exact      the memories of largest q . k
    bucketed   the memory of largest q . k in each of topk buckets: position modulo topk (the authors' approximation)

Both depend on positions alone, however the memories are cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from kinformer.kernels import LookupImpl, names_of
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.softmax import Gathered
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import multiplies_int8

# Memories in pieces that follow each other, each a range of the slots of its tensors, so that none is copied.


class MemorySlice(NamedTuple):
    """A range of memories: ``size`` slots from ``first`` on of ``k``, ``v`` [batch, heads, slots, head_dim]."""

    k: Tensor
    v: Tensor
    first: int
    size: int

    @property
    def keys(self) -> Tensor:
        """Return a view of the keys in range."""
        return self.k[:, :, self.first : self.first + self.size]


def gathered(slots: Tensor, slices: list[MemorySlice]) -> tuple[Gathered, Gathered]:
    """Return the keys and the values at ``slots``, the result of ``look_up``, in the form that attention takes."""
    extents = tuple((item.first, item.size) for item in slices)
    keys, values = tuple(item.k for item in slices), tuple(item.v for item in slices)
    return Gathered(slots, keys, extents), Gathered(slots, values, extents)


# Scores as whole numbers whose last bits say which row they are of: one maximum gives the best and where it is.
#
# Both kinds give positive numbers, of queries and keys of length 1 at most.
#
# Floats: positive floats, whose bits order as integers do; the last bits give way to the row. So scores that differ in
# these bits alone count as equal: in float32 by 2^-12 with 2048 rows (65,536 memories in 32 buckets), in float64 by
# nothing to speak of. On a GPU the products are bfloat16 where there are many.
#
# Integers: q' = round(s q) and k' = round(t k) in int8, with a scale for each query and one for all keys, and the
# number 2^30 + 2^bits (q' . k') + row. By Cauchy and Schwarz |q' . k'| <= (s |q| + r) (t |k| + r), r = sqrt(head_dim) /
# 2, so no scale exceeds what keeps this below 2^(30 - bits); nor does any element exceed 127. As both scales are 127 at
# least, a score is off by at most r / s + r / t + r^2 / (s t), and the chosen memory is at most sqrt(head_dim) / 60
# worse than the best. This is the worst case: rounding errors cancel, and the difference is some thousandths.
#
# What is chosen is scored again where it is attended to, so only the choice is rounded.

_POSITIVE = 1.0625
"""Added to scores, which are at least -1, up to rounding."""
_MANY = 1024
"""Among this many memories the nearest are near to each other: the choice among near neighbours matters little."""
_QUERIES = 32
"""From this many queries on it pays to round the keys."""
_CACHED = 1 << 12
"""Number of keys to round at a time."""
_INT8 = 127


class _Numbered:
    """Numbered scores of dtype ``whole``; the last ``bits`` hold the row, and ``base`` is added.

    With the row number ``never`` the score of a memory is not positive.
    """

    whole: torch.dtype
    bits: int
    base = 0
    never: int

    def rows(self, order: Tensor, per: int) -> Tensor:
        """Return the row numbers [n, 1], with ``per`` memories to a row, of the memories that ``order`` [n] counts."""
        return (order[:, None] // per).to(self.whole).add_(self.base)

    def row_of(self, best: Tensor) -> Tensor:
        """Return the rows of numbered scores."""
        return (best & ((1 << self.bits) - 1)).long()


class Floats(_Numbered):
    """Numbered scores as floats, of queries [queries, head_dim], with ``bits`` for the row number."""

    def __init__(self, q: Tensor, bits: int, narrow: bool) -> None:
        self.q, self.bits, self.dtype = q.to(torch.bfloat16) if narrow else q, bits, q.dtype
        self.whole = torch.int32 if q.dtype == torch.float32 else torch.int64
        self.never = torch.iinfo(self.whole).min

    def rounded(self, keys: Tensor) -> Tensor:
        """Return keys in the dtype that :meth:`write` takes."""
        return keys.to(self.q.dtype)

    def write(self, out: Tensor, keys: Tensor, queries: slice, rows: Tensor) -> None:
        """Write numbered scores of ``keys`` [n, head_dim] and queries to ``out`` [n, queries] of ``whole`` numbers."""
        out.view(self.dtype).copy_(keys @ self.q[queries].T).add_(_POSITIVE)
        out.bitwise_and_(-1 << self.bits).add_(rows)


class Integers(_Numbered):
    """Numbered scores from int8 products, of queries [queries, head_dim] and ``keys`` [n, head_dim] of one scale."""

    whole = torch.int32
    base = 1 << 30
    never = -base

    def __init__(self, q: Tensor, keys: Sequence[Tensor], bits: int) -> None:
        limit = _longest(q.shape[1], bits)
        self.q = (q * (_INT8 / q.abs().amax(dim=1, keepdim=True)).clamp(max=limit)).round_().to(torch.int8)
        largest = max(float(end.abs()) for piece in keys for end in piece.aminmax())
        self.scale, self.bits = min(_INT8 / largest, limit) if largest else limit, bits

    def rounded(self, keys: Tensor) -> Tensor:
        out = torch.empty(keys.shape, dtype=torch.int8, device=keys.device)
        for some, part in zip(keys.split(_CACHED), out.split(_CACHED), strict=True):
            part.copy_((some.float() * self.scale).round_())
        return out

    def write(self, out: Tensor, keys: Tensor, queries: slice, rows: Tensor) -> None:
        torch._int_mm(keys, self.q[queries].T, out=out)
        torch.add(rows, out, alpha=1 << self.bits, out=out)


def numbered(q: Tensor, keys: Sequence[Tensor], rows: int) -> Floats | Integers:
    """Return the numbered scores of q [queries, head_dim] with ``keys`` [n, head_dim], ``rows`` a bucket at most."""
    bits = (rows - 1).bit_length()
    many = q.dtype == torch.float32 and sum(map(len, keys)) >= _MANY
    fine = _longest(q.shape[1], bits) >= _INT8
    real = not isinstance(q, FakeTensor)  # whose products are counted
    if many and fine and real and len(q) >= _QUERIES and multiplies_int8(q.device.type):
        return Integers(q, keys, bits)
    return Floats(q, bits, narrow=many and q.device.type != "cpu")


def _longest(head_dim: int, bits: int) -> float:
    """Return the largest scale with which no number overflows, of vectors up to ``_POSITIVE`` long."""
    return (2 ** ((30 - bits) / 2) - math.sqrt(head_dim) / 2) / _POSITIVE


# Searches by all scores q . k at once: the truth that the fast searches are held to.


def exact_reference(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the ``topk`` best of all memories; see :func:`kinformer.kernels.lookup.look_up`."""
    best, slots = _scores(q, pieces).topk(min(topk, sum(piece.size for piece in pieces)), dim=-1)
    slots = torch.where(best > -torch.inf, slots, -1)
    return pad(slots, (0, topk - slots.shape[-1]), value=-1)


def bucketed_reference(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the best memory of each bucket; see :func:`kinformer.kernels.lookup.look_up`."""
    best = _scores(q, pieces).unflatten(-1, (-1, topk)).argmax(dim=-2)
    return best * topk + torch.arange(topk, device=q.device)


def _scores(q: Tensor, pieces: list[MemorySlice]) -> Tensor:
    return q @ torch.cat([piece.keys for piece in pieces], dim=2).to(q.dtype).mT


# Searches tile by tile: only the best scores of a tile outlive it, so a tile stays in the cache.
#
# A bucket's best is computed by one maximum over whole numbers (see ``numbered``), which rounds scores.

_PAIRS = 1 << 20
"""Scores in a tile."""
_FEW = 8
"""So few queries take all of their scores at once."""


def exact_chunked(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the ``topk`` memories of largest score among all seen so far, tile after tile."""
    best = q.new_full((*q.shape[:3], topk), -torch.inf)
    best_slots = torch.full_like(best, -1, dtype=torch.int64)
    rows = max(4 * topk, _PAIRS // (q.shape[0] * q.shape[1] * q.shape[2]))
    for keys, begin in _tiles([piece.keys for piece in pieces], rows):
        scores = q @ keys.to(q.dtype).mT
        new = torch.arange(begin, begin + keys.shape[2], device=q.device).expand(scores.shape)
        best, chosen = torch.cat([best, scores], dim=-1).topk(topk, dim=-1)
        best_slots = torch.cat([best_slots, new], dim=-1).gather(-1, chosen)
    return best_slots


def bucketed_chunked(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the best memory of each bucket; many queries go one head of one row at a time."""
    if q.shape[2] <= _FEW:
        scores = torch.cat([q @ piece.keys.to(q.dtype).mT for piece in pieces], dim=-1)
        rows = scores.unflatten(-1, (-1, topk)).max(dim=-2).indices
    else:
        queries = q.to(torch.promote_types(q.dtype, torch.float32))
        heads = [
            _buckets(queries[row, head], [piece.keys[row, head] for piece in pieces], topk)
            for row in range(q.shape[0])
            for head in range(q.shape[1])
        ]
        rows = torch.stack(heads).view(*q.shape[:2], topk, q.shape[2]).mT
    return rows * topk + torch.arange(topk, device=q.device)


def _buckets(q: Tensor, keys: list[Tensor], topk: int) -> Tensor:
    """Return the row [topk, time] of the best memory in each bucket, for q [time, head_dim]."""
    time, total = q.shape[0], sum(len(piece) for piece in keys) // topk
    scores = numbered(q, keys, total)
    numbers = scores.rows(torch.arange(total * topk, device=q.device), topk)
    size = topk * max(1, _PAIRS // (time * topk))
    tile = torch.empty(size, time, dtype=scores.whole, device=q.device)
    best = torch.zeros(topk, time, dtype=scores.whole, device=q.device)
    for some, begin in _tiles(keys, size):
        part = tile[: len(some)]
        scores.write(part, scores.rounded(some), slice(None), numbers[begin : begin + len(some)])
        torch.maximum(best, part.view(-1, topk, time).amax(dim=0), out=best)
    return scores.row_of(best)


def _tiles(keys: list[Tensor], rows: int) -> Iterator[tuple[Tensor, int]]:
    """Yield keys [..., memories, head_dim] of at most ``rows`` memories at a time, and the number of the first."""
    begin = 0
    for piece in keys:
        for first in range(0, piece.shape[-2], rows):
            yield piece[..., first : first + rows, :], begin + first
        begin += piece.shape[-2]


SEARCHES = ("exact", "bucketed")
IMPLS = names_of(LookupImpl)


class Search(NamedTuple):
    """The settings of a search: ``kind`` is one of ``SEARCHES``.

    ``impl``: "chunked" never holds all scores, "reference" does; "auto" is "chunked".
    """

    kind: str
    topk: int
    impl: LookupImpl = "auto"


def look_up(q: Tensor, pieces: list[MemorySlice], search: Search) -> Tensor:
    """Return the memories that the queries q [batch, heads, time, head_dim] attend to, [batch, heads, time, topk]
    int64, without gradients.

    Memories are counted from the first memory of the first piece; -1 stands for none. For "bucketed" the position of
    the first memory and the size of each piece are multiples of topk, and queries and keys have length 1 at most.
    """
    if search.kind not in SEARCHES:
        raise KinformerError(f"memory: search is {search.kind!r}, expected one of {', '.join(SEARCHES)}.")
    if search.impl not in IMPLS:
        raise KinformerError(f"memory: impl is {search.impl!r}, expected one of {', '.join(IMPLS)}.")
    pieces = [piece for piece in pieces if piece.size]
    if not pieces:
        return torch.full((*q.shape[:3], search.topk), -1, dtype=torch.int64, device=q.device)
    if search.impl == "reference" or q.is_meta:
        find = exact_reference if search.kind == "exact" else bucketed_reference
    else:
        find = exact_chunked if search.kind == "exact" else bucketed_chunked
    with torch.no_grad():
        return find(q.detach(), pieces, search.topk)


# The memories of a sequence while a chunk passes: queries search segment by segment, and recent memories are evicted
# in larger blocks.
#
# A query sees the memories of earlier segments. Memories up to the last multiple of ``batch_of`` positions are moved
# to separate tensors, which are copied only when the next part joins them. The other memories are still among the
# recent ones. All boundaries are multiples of positions, so results do not depend on how the sequence is cut.


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
    """Tokens ``begin .. end`` of a chunk, of one sequence: its ``position``, and whether it began before (``past``)."""

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
                if stop % (part := self.rules.batch_of) == 0:
                    first, old = self._slot(stop - part, run), self.evicted.last(self.rules.memory_size - part)
                    new = (item[:, :, first : first + part].to(old.k.dtype) for item in self.fresh)
                    self.evicted = Evicted(*(torch.cat(item, dim=2) for item in zip(old, new, strict=True)))
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
