"""Masked language modelling: windows of a text, between BOS and EOS, with some of their tokens masked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kinformer.data import BosEos, RandomWindows, Rows, Split
from kinformer.data.buckets import lay
from kinformer.data.masking import Masking
from kinformer.data.permutation import mix, permute
from kinformer.runtime.errors import KinformerError

_TRAINING, _EVALUATION = 6, 7


class MaskedRows(NamedTuple):
    """The rows as a model sees them, and for every masked token the one before
    it in the text, -1 if none: [rows, n]."""

    rows: Rows
    before: np.ndarray


class MaskedText:
    """The windows of ``split`` that are ``length`` tokens with BOS and EOS; all draws follow from ``seed``.

    A step of training masks other tokens each time. In order, as for measuring, what is masked of a window follows from
    its position in the split alone.
    """

    def __init__(self, split: Split, length: int, masking: Masking, ends: BosEos, seed: int) -> None:
        self.room = length - ends.size
        if self.room < 1:
            raise KinformerError(f"`length` {length}: leaves no room beside BOS and EOS; give more.")
        self.split, self.length, self.masking, self.ends, self.seed = split, length, masking, ends, seed

    def __len__(self) -> int:
        """Return how many windows cover the split, of which the last may be short."""
        return -(-len(self.split) // self.room)

    def sampler(self, batch_size: int) -> RandomWindows:
        """Return the order in which training sees windows."""
        return RandomWindows(self.split, batch_size, self.room, self.seed)

    def batch(self, sampler: RandomWindows, step: int, rank: int = 0, world: int = 1) -> Rows:
        """Return a process's rows of a step."""
        starts = sampler.starts(step)
        share = slice(rank * (len(starts) // world), (rank + 1) * (len(starts) // world))
        keys = mix(self.seed, _TRAINING, step, np.arange(len(starts)))
        return self.show(starts[share], keys[share]).rows

    def in_order(self, rows: int, shuffled: bool = False) -> Iterator[MaskedRows]:
        """Yield all windows, ``rows`` at a time: as they follow each other, or from all over the split."""
        starts = np.arange(0, len(self.split), self.room)
        if shuffled:
            starts = starts[permute(np.arange(len(starts)), len(starts), mix(self.seed, _EVALUATION))]
        for first in range(0, len(starts), rows):
            some = starts[first : first + rows]
            yield self.show(some, mix(self.seed, _EVALUATION, some))

    def show(self, starts: np.ndarray, keys: np.ndarray) -> MaskedRows:
        """Return the windows that begin at ``starts`` with tokens masked by ``keys``."""
        lengths = np.minimum(self.room, len(self.split) - starts)
        texts = [
            self.split.tokens(start, length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        width = int(lengths.max())
        plain, _ = lay(texts, BosEos(), width)
        masked, positions, labels = self.masking(plain, keys, lengths)
        shown = [row[:length] for row, length in zip(masked, lengths.tolist(), strict=True)]
        tokens, valid = lay(shown, self.ends, width + self.ends.size)
        before = np.where(positions > 0, np.take_along_axis(plain, np.maximum(positions - 1, 0), 1), -1)
        return MaskedRows(Rows(tokens, valid, labels, positions + self.ends.before), before)
