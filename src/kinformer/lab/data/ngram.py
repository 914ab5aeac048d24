"""An interpolated Witten-Bell n-gram model of bytes: the baseline of models on the same data.

P(w | h) = (c(h w) + T(h) P(w | h')) / (c(h) + T(h)), h' being h without its first byte, c counts, T(h) the number of
distinct bytes seen after h, and 1/256 below the empty context (Witten and Bell 1991, method C, in the interpolated form
of Chen and Goodman 1998). P(w | h) = P(w | h') for a context h that was never seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinformer.lab.data.sampling import Split
from kinformer.runtime.errors import KinformerError, plural

_BLOCK = 1 << 22
_MOST = 7


@dataclass(frozen=True, eq=False)
class _Order:
    """Sorted n-grams of one order (8 bits a byte, oldest highest) and contexts, counts of both, and ``followers``."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    followers: np.ndarray

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray) -> _Order:
        contexts = grams >> np.uint64(8)
        first = np.flatnonzero(np.append(True, contexts[1:] != contexts[:-1]))
        followers = np.diff(np.append(first, len(grams))).astype(np.uint16)
        return cls(grams, counts, contexts[first], np.add.reduceat(counts, first, dtype=counts.dtype), followers)

    def interpolate(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return P of each gram's last byte after the bytes before it, ``lower`` being P after one byte less."""
        index = find_sorted(self.contexts, grams >> np.uint64(8))
        seen = index >= 0
        index, gram = index[seen], find_sorted(self.grams, grams[seen])
        count = np.where(gram >= 0, self.counts[gram], 0)
        followers = self.followers[index].astype(np.float64)
        result = lower.copy()
        # (c(h w) + T(h) P(w | h')) / (c(h) + T(h))
        result[seen] = (count + followers * lower[seen]) / (self.totals[index] + followers)
        return result


class NgramModel:
    """A model that predicts a byte from at most ``context`` bytes before it, by counts of n-grams, n = 1 to ``context``
    + 1. Memory follows the number of distinct n-grams. Train on ``split.take(n)`` where the whole would take too
    long."""

    def __init__(self, split: Split, context: int = 5) -> None:
        if not 0 <= context <= _MOST:
            raise KinformerError(
                f"context is {context} but an n-gram model of bytes takes from 0 to {plural(_MOST, 'byte')}."
            )
        split.text.require(context + 1, f"an n-gram model with {plural(context, 'byte')} of context")
        self.context = context
        grams, counts = _count(split.text, context + 1)
        self._orders = [_Order.of(grams, counts)]
        for size in range(context, 0, -1):
            first = _grams(split.text.tokens(0, size), size)
            # Counts of shorter grams are sums of longer ones, except for the first gram of the text, which ends no
            # longer one.
            suffixes = np.append(grams & _mask(size), first)
            grams, counts = merge_counts(suffixes, np.append(counts, counts.dtype.type(1)))
            self._orders.insert(0, _Order.of(grams, counts))

    def probabilities(self, data: np.ndarray, start: int = 0) -> np.ndarray:
        """Return P of each byte from ``start`` on after those before it, float64; ``data`` is uint8 [length]. Byte i is
        predicted from at most i bytes of context, so the first one by its frequency."""
        grams = _grams(np.concatenate([np.zeros(self.context, np.uint8), data]), self.context + 1)[start:]
        # Below the empty context all bytes are equally likely.
        result = np.full(len(grams), 1 / 256)
        for size, order in enumerate(self._orders, start=1):
            first = max(0, size - 1 - start)
            result[first:] = order.interpolate(grams[first:] & _mask(size), result[first:])
        return result

    def bits_per_byte(self, split: Split) -> float:
        """Return bits per byte of ``split``, by the protocol of all models: its first byte costs 8 bits."""
        text, bits = split.text, 8.0
        text.require(2, "measuring")
        for start in range(1, len(text), _BLOCK):
            context = min(start, self.context)
            data = text.tokens(start - context, min(_BLOCK, len(text) - start) + context)
            bits -= float(np.log2(self.probabilities(data, context)).sum())
        return bits / len(text)


def _count(split: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct runs of ``size`` bytes of the split, sorted, and how often each occurs."""
    grams, counts = np.empty(0, np.uint64), np.empty(0, np.uint32 if len(split) < 1 << 32 else np.uint64)
    for start in range(0, len(split) - size + 1, _BLOCK):
        data = split.tokens(start, min(_BLOCK + size - 1, len(split) - start))
        fresh, times = np.unique(_grams(data, size), return_counts=True)
        grams, counts = merge_counts(np.append(grams, fresh), np.append(counts, times.astype(counts.dtype)))
    return grams, counts


def merge_counts(grams: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted distinct grams and the sums of their counts."""
    order = np.argsort(grams, kind="stable")
    grams = grams[order]
    first = np.flatnonzero(np.append(True, grams[1:] != grams[:-1]))
    return grams[first], np.add.reduceat(counts[order], first, dtype=counts.dtype)


def _grams(data: np.ndarray, size: int) -> np.ndarray:
    """Return each run of ``size`` bytes of ``data`` as an integer, the last byte lowest; uint64 [runs]."""
    count = len(data) - size + 1
    grams = np.zeros(count, np.uint64)
    for shift in range(size):
        grams = (grams << np.uint64(8)) | data[shift : shift + count].astype(np.uint64)
    return grams


def _mask(size: int) -> np.uint64:
    return np.uint64((1 << (8 * size)) - 1)


def find_sorted(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the index of each value in a sorted table, -1 where it is not."""
    index = np.minimum(np.searchsorted(table, values), len(table) - 1)
    return np.where(table[index] == values, index, -1)
