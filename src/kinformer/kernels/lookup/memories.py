"""Memories in pieces, and their scores as whole numbers, which a search compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import kinformer.runtime.flops  # noqa: F401 (int8 products are counted)
from kinformer.kernels.softmax import Gathered
from kinformer.runtime.processor import multiplies_int8

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
