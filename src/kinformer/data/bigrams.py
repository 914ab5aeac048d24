"""Frequencies of tokens and of pairs of tokens: the baseline of guessing a masked token.

P(w) = (c(w) + 1) / (N + V), P(w | h) = (c(h w) + T(h) P(w)) / (c(h) + T(h)), T(h) being how many tokens come after h,
each counted once (Witten and Bell 1991); P(w) where h was never seen, or is masked.
"""

from __future__ import annotations

import numpy as np

from kinformer.data.ngram import find_sorted, merge_counts
from kinformer.data.split import Split

_BLOCK = 1 << 22


class Bigrams:
    """The counts of a split's tokens and neighbouring pairs, of bytes or of a tokenizer's ids."""

    def __init__(self, split: Split) -> None:
        self.size = split.vocab_size
        counts = np.zeros(self.size, np.int64)
        pairs, times = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(split), _BLOCK):
            tokens = split.tokens(start, min(_BLOCK + 1, len(split) - start)).astype(np.int64)
            counts += np.bincount(tokens[:_BLOCK], minlength=self.size)
            if len(tokens) > 1:
                fresh, seen = np.unique(tokens[:-1] * self.size + tokens[1:], return_counts=True)
                pairs, times = merge_counts(np.append(pairs, fresh), np.append(times, seen))
        self.single = (counts + 1) / (counts.sum() + self.size)
        self.pairs, self.times = pairs, times
        self.followed = np.bincount(pairs // self.size, times, self.size)
        self.followers = np.bincount(pairs // self.size, minlength=self.size)

    def probabilities(self, tokens: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return P of each of ``tokens`` [n] alone, and after the one ``before`` it [n] (-1: masked); float64."""
        single = self.single[tokens]
        seen = np.flatnonzero((before >= 0) & (self.followed[before] > 0))
        double = single.copy()
        if len(seen):
            first = before[seen]
            index = find_sorted(self.pairs, first * self.size + tokens[seen])
            count = np.where(index >= 0, self.times[index], 0)
            follow = self.followers[first]
            # (c(h w) + T(h) P(w)) / (c(h) + T(h))
            double[seen] = (count + follow * single[seen]) / (self.followed[first] + follow)
        return single, double
