"""The loss by position within a window, in bins that double: tokens with 1, 2, 3-4, 5-8, 9-16, ... before them."""

from __future__ import annotations

from collections import defaultdict
from math import log
from typing import NamedTuple

from torch import Tensor


class Bin(NamedTuple):
    """The predictions that had ``first`` to ``last`` tokens of their window before them."""

    first: int
    last: int
    tokens: int
    bits_per_byte: float


class ByPosition:
    """The sums of negative log-likelihoods by how many tokens of its window a prediction had before it."""

    def __init__(self) -> None:
        self._nats: dict[int, float] = defaultdict(float)
        self._tokens: dict[int, int] = defaultdict(int)

    def add(self, nats: Tensor, counted: Tensor) -> None:
        """Add ``nats`` [rows, size], whose column j had j + 1 tokens before it;
        ``counted`` is bool of the same shape."""
        by_column = nats.where(counted, 0.0).sum(dim=0).cpu()
        tokens = counted.sum(dim=0).cpu()
        first, power = 0, 0
        while first < len(by_column):
            last = min(1 << power, len(by_column))
            self._nats[power] += float(by_column[first:last].sum())
            self._tokens[power] += int(tokens[first:last].sum())
            first, power = last, power + 1

    def bins(self, tokens_per_byte: float = 1.0) -> tuple[Bin, ...]:
        """Return the bins that hold a prediction, in order; bits per byte take
        every token for the mean number of bytes."""
        return tuple(
            Bin((1 << power >> 1) + 1, 1 << power, count, self._nats[power] / log(2) / count * tokens_per_byte)
            for power, count in sorted(self._tokens.items())
            if count
        )
