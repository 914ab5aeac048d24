"""An inverted file over frozen centroids (Sivic and Zisserman 2003; Jegou et al. 2011): only some lists are looked at.

A memory is in the list of the centroid of largest k . c. Memories are sorted by list and, within, by position when they
are evicted from the window; a query looks at the lists of the ``probes`` centroids of largest q . c. The memories of a
list are dealt out to ``share`` buckets in turn, and the best of each is returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import kinformer.runtime.flops  # noqa: F401 (int8 products are counted)
from kinformer.core.contract import state_dtype
from kinformer.kernels.softmax import Gathered
from kinformer.runtime.processor import multiplies_int8

# Memories in pieces that follow each other, each a range of the slots of its tensors, so that none is copied.


class MemorySlice(NamedTuple):
    """A range of memories, ``size`` of them from slot ``first`` on, of ``k``, ``v`` [batch, heads, slots, head_dim]."""

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
# Both kinds give positive numbers, of queries and keys that are no longer than 1.
#
# Floats: positive floats, whose bits order as integers do; the last bits give way to the row. So scores that differ in
# these bits alone count as equal: in float32 by 2^-12 with 2048 rows (65,536 memories in 32 buckets), in float64 by
# nothing to speak of. On a GPU the products are bfloat16 where there are many.
#
# Integers: q' = round(s q) and k' = round(t k) in int8, with a scale for each query and one for all keys, and the
# number 2^30 + 2^bits (q' . k') + row. By Cauchy and Schwarz |q' . k'| <= (s |q| + r) (t |k| + r), r = sqrt(head_dim)
# / 2, so no scale exceeds what keeps this below 2^(30 - bits); nor does any element exceed 127. As both scales are 127
# at least, a score is off by at most r / s + r / t + r^2 / (s t), and what is chosen is at most sqrt(head_dim) / 60
# worse than the best. That is the worst of cases: rounding errors cancel, and it is some thousandths.
#
# What is chosen is scored again where it is attended to, so only the choice is rounded.

_POSITIVE = 1.0625
"""Added to scores, which are at least -1, up to rounding."""
_MANY = 1024
"""Among this many memories the nearest are near to each other: it matters little which of them are returned."""
_QUERIES = 32
"""From this many queries on it pays to round the keys."""
_CACHED = 1 << 12
"""Keys that are rounded at a time."""
_INT8 = 127


class _Numbered:
    """Numbered scores of dtype ``whole``; the last ``bits`` hold the row, and ``base`` is added.

    With ``never`` as its row number, a memory has no positive score.
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
    """Numbered scores that are floats, of queries [queries, head_dim], with ``bits`` for the row number."""

    def __init__(self, q: Tensor, bits: int, narrow: bool) -> None:
        self.q, self.bits, self.dtype = q.to(torch.bfloat16) if narrow else q, bits, q.dtype
        self.whole = torch.int32 if q.dtype == torch.float32 else torch.int64
        self.never = torch.iinfo(self.whole).min

    def rounded(self, keys: Tensor) -> Tensor:
        """Return keys in the dtype that :meth:`write` takes."""
        return keys.to(self.q.dtype)

    def write(self, out: Tensor, keys: Tensor, queries: slice, rows: Tensor) -> None:
        """Write numbered scores of ``keys`` [n, head_dim] and some queries to
        ``out`` [n, queries] of ``whole`` numbers."""
        out.view(self.dtype).copy_(keys @ self.q[queries].T).add_(_POSITIVE)
        out.bitwise_and_(-1 << self.bits).add_(rows)


class Integers(_Numbered):
    """Numbered scores from int8 products, of queries [queries, head_dim] and tensors
    ``keys`` [n, head_dim] with one scale."""

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
    """Return the numbered scores of q [queries, head_dim] with ``keys`` [n, head_dim], of
    which a bucket holds ``rows`` at most."""
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


class CoarseQuantizer(NamedTuple):
    """The centroids [heads, lists, head_dim] of the lists, and how many of these (``probes``) a query looks at."""

    centroids: Tensor
    probes: int


class InvertedFile(NamedTuple):
    """The memories sorted by list: keys [batch, heads, slots, head_dim], and ``assignments`` [.., slots, 2] int64, 1 +
    the list of each (0: an empty slot) and its position. Those from position ``first`` on may be returned."""

    k: Tensor
    assignments: Tensor
    first: int


def centroids(num_heads: int, count: int, head_dim: int) -> Tensor:
    """Return random directions [num_heads, count, head_dim], the same ones for every call."""
    generator = torch.Generator("cpu").manual_seed(count)
    directions = torch.randn(num_heads, count, head_dim, generator=generator, device="cpu")
    return directions / directions.norm(dim=-1, keepdim=True)


def insert(k: Tensor, v: Tensor, assignments: Tensor, keep: int, filed: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Return the last ``keep`` positions of all three [batch, heads, slots, width], sorted by list and then by
    position.

    They come in the order of their positions, after those that are ``filed`` already, of which there are ``keep`` at
    most.
    """
    new = (k, v, assignments)
    old = tuple(filed) or tuple(item[:, :, :0] for item in new)
    numbers, positions = torch.cat([old[2], assignments], dim=2).unbind(-1)
    listed = torch.where(positions > positions.amax(dim=-1, keepdim=True) - keep, numbers, -1)
    order = listed.argsort(dim=-1, stable=True)[..., listed.shape[-1] - keep :]
    return tuple(_taken(*item, order) for item in zip(old, new, strict=True))


def _taken(old: Tensor, new: Tensor, order: Tensor) -> Tensor:
    """Return the slots ``order`` [batch, heads, n] of two tensors that follow each other, without joining them."""
    count = old.shape[2]
    if not count:
        return _rows(new, order)
    taken, late = _rows(old, order.clamp(max=count - 1)), order >= count
    row, head, slot = torch.nonzero_static(late, size=new[..., 0].numel()).unbind(-1)  # all that are new
    taken[row, head, slot] = new[row, head, order[row, head, slot] - count]
    return taken


def _rows(x: Tensor, slots: Tensor) -> Tensor:
    """Return the rows [batch, heads, n, width] of x at ``slots`` [batch, heads, n]."""
    first = x.shape[2] * torch.arange(slots.shape[0] * slots.shape[1], device=x.device).view(*slots.shape[:2], 1)
    return x.flatten(0, 2).index_select(0, (first + slots).flatten()).view(*slots.shape, -1)


def assignments_of(k: Tensor, position: int, lists: CoarseQuantizer) -> Tensor:
    """Return the list and position [batch, heads, n, 2] of new memories with keys ``k``, the first at ``position``."""
    nearest = (k @ lists.centroids.to(k)[None].mT).argmax(dim=-1) + 1
    positions = torch.arange(position, position + k.shape[2], device=k.device).expand_as(nearest)
    return torch.stack([nearest, positions], dim=-1)


def probed(q: Tensor, lists: CoarseQuantizer) -> Tensor:
    """Return the lists (from 1 on) that each query looks at: [batch, heads, time, probes]."""
    return (q @ lists.centroids.to(q)[None].mT).topk(lists.probes, dim=-1).indices + 1


def find(q: Tensor, filed: InvertedFile, lists: CoarseQuantizer, share: int) -> Tensor:
    """Return the slots [batch, heads, time, probes * share] of the best memories in the probed lists, -1 for none."""
    accumulator = state_dtype(q.dtype)
    chosen, count = probed(q, lists), lists.centroids.shape[1]
    if q.is_meta or isinstance(q, FakeTensor):  # what even lists would cost
        _ = q @ filed.k[:, :, : filed.k.shape[2] * lists.probes // count].mT
        return chosen.repeat_interleave(share, dim=-1)
    borders = torch.arange(1, count + 2, device=q.device).expand(*q.shape[:2], -1).contiguous()
    begins = torch.searchsorted(filed.assignments[..., 0].contiguous(), borders).tolist()
    slots = q.new_empty(*chosen.shape, share, dtype=torch.int64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            visible = filed.assignments[row, head, :, 1] >= filed.first
            one = _Head(filed.k[row, head], visible, begins[row][head], share)
            slots[row, head] = one.find(q[row, head].to(accumulator), chosen[row, head])
    return slots.flatten(3)


class _Head:
    """The filed keys [slots, head_dim] of one head, list c of which begins at slot ``begins[c - 1]``."""

    def __init__(self, k: Tensor, visible: Tensor, begins: list[int], share: int) -> None:
        self.k, self.visible, self.begins, self.share = k, visible, begins, share

    def find(self, q: Tensor, chosen: Tensor) -> Tensor:
        """Return slots [time, probes, share] for q [time, head_dim] that looks
        at the lists ``chosen`` [time, probes]."""
        order = chosen.flatten().argsort()
        ends = torch.bincount(chosen.flatten(), minlength=len(self.begins)).cumsum(0).tolist()
        scores = numbered(q[order // chosen.shape[1]], [self.k], -(-max(self._sizes()) // self.share))
        keys, rows = scores.rounded(self.k), self._rows(scores)
        best = torch.zeros(self.share, len(order), dtype=scores.whole, device=q.device)
        for listed, (begin, end) in zip(pairwise(self.begins), pairwise(ends), strict=True):
            listed_slots = slice(*listed)
            if begin < end and listed_slots.start < listed_slots.stop:
                self._best(scores, keys[listed_slots], slice(begin, end), rows[listed_slots], best[:, begin:end])
        first = torch.tensor(self.begins, device=q.device)[chosen.flatten()[order] - 1]
        slots = scores.row_of(best) * self.share + torch.arange(self.share, device=q.device)[:, None] + first
        result = torch.empty(len(order), self.share, dtype=torch.int64, device=q.device)
        result[order] = torch.where(best > 0, slots, -1).T
        return result.view(*chosen.shape, self.share)

    def _sizes(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.begins)]

    def _rows(self, scores: Floats | Integers) -> Tensor:
        """Return row numbers [slots, 1] within the lists; hidden memories get a number that never wins."""
        begins, sizes = (torch.tensor(item, device=self.k.device) for item in (self.begins, self._sizes()))
        slots = torch.arange(len(self.k), device=self.k.device)
        first = begins[:1].repeat(len(self.k))
        first[self.begins[0] :] = begins[:-1].repeat_interleave(sizes, output_size=len(self.k) - self.begins[0])
        return scores.rows(slots - first, self.share).masked_fill_(~self.visible[:, None], scores.never)

    def _best(self, scores: Floats | Integers, keys: Tensor, queries: slice, rows: Tensor, best: Tensor) -> None:
        """Compute the best [share, queries] of each bucket of one list into
        ``best``, not positive where there is none."""
        size = len(keys)
        numbers = best.new_empty(-(-size // self.share) * self.share, best.shape[1])
        numbers[size:] = 0
        scores.write(numbers[:size], keys, queries, rows)
        torch.amax(numbers.view(-1, self.share, best.shape[1]), dim=0, out=best)
