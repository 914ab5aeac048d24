"""What a head asks of a store of (key, next token) entries, and what it is given.

A store outlives every sequence: it is a read-only attachment of a head, never part of a state.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Neighbours(NamedTuple):
    """The entries nearest to each of n queries, nearest first; k is at most what was asked for.

    ``distances`` [n, k] float32, squared L2; ``tokens`` [n, k] int64, the token that followed; ``entries`` [n, k]
    int64, numbers in the store. Where a query has fewer than k neighbours, the last ones are (infinity, 0, -1).
    """

    distances: Tensor
    tokens: Tensor
    entries: Tensor


class Searcher(Protocol):
    """A store that can be asked. ``bytes_read`` counts what all searches so far read of its files."""

    bytes_read: int

    @property
    def entries(self) -> int:
        """How many entries may be found."""
        ...

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """The nearest entries of ``queries`` [n, dim], on their device."""
        ...
