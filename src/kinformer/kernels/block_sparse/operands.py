"""What the tile loops are given: the tensors of one section, and which of its rows and heads are worked on at once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.kernels.block_sparse.plan import Interval


class Operands(NamedTuple):
    """q [n, group, time, head_dim], k, v [n, slots, ...] of one section, n = rows * heads; the words of dropout;
    ``hidden`` [rows, slots] bool."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    interval: Interval
    words: tuple[Tensor, Tensor] | None = None
    p: float = 0.0
    hidden: Tensor | None = None


class Place(NamedTuple):
    """Some of the n of a tile: a slice of them, and which heads of each row they are."""

    n: slice
    heads: slice
    shape: tuple[int, ...]
