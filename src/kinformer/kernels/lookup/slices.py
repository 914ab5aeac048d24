"""Memories in pieces that follow each other, each a range of the slots of its tensors, so that none is copied."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MemorySlice(NamedTuple):
    """``size`` memories from slot ``first`` on of ``k``, ``v`` [batch, heads, slots, head_dim]."""

    k: Tensor
    v: Tensor
    first: int
    size: int

    @property
    def keys(self) -> Tensor:
        """The keys in range, a view."""
        return self.k[:, :, self.first : self.first + self.size]
