"""Memories in pieces that follow each other, each a range of the slots of its tensors, so that none is copied."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.kernels.softmax.request import Gathered


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
