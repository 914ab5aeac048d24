"""Batches of pairs by tokens: pairs of like length together, as many as fit into a number of tokens.

Like the other samplers a pure function of (seed, step). Pairs are sorted by the longer of their sides; where a batch
ends depends on the lengths alone, which pairs of one length share a batch on the epoch, and the order of batches too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kinformer.data.permutation import mix, permute

_TIES, _ORDER = 8, 9


class TokenBatches:
    """The batches: ``widths`` [pairs] tokens, at most ``tokens`` of rows x width in a batch,
    whose rows are a multiple of ``multiple``."""

    def __init__(self, widths: Sequence[int] | np.ndarray, tokens: int, seed: int, multiple: int = 1) -> None:
        self.widths, self.seed = np.asarray(widths, np.int64), seed
        self.multiple = multiple
        self.starts = _starts(np.sort(self.widths), tokens, multiple)
        self._epoch: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    @property
    def batches(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.starts) - 1

    def indices(self, step: int) -> np.ndarray:
        """Return the pairs of batch number ``step``, int64; a last one that is no
        multiple is filled up with its first."""
        epoch, number = divmod(step, self.batches)
        if self._epoch[0] != epoch:
            ties = mix(self.seed, _TIES, epoch, np.arange(len(self.widths)))
            self._epoch = epoch, np.lexsort((ties, self.widths))
        batch = permute(np.array([number]), self.batches, mix(self.seed, _ORDER, epoch))[0]
        result = self._epoch[1][self.starts[batch] : self.starts[batch + 1]]
        return np.resize(result, -(-len(result) // self.multiple) * self.multiple)


def _starts(widths: np.ndarray, tokens: int, multiple: int) -> np.ndarray:
    """Return where batches of the rising ``widths`` begin, and at last where they end."""
    starts = [0]
    while starts[-1] < len(widths):
        start = starts[-1]
        counts = np.arange(1, min(tokens, len(widths) - start) + 1)
        fitting = int(np.searchsorted(counts * widths[start : start + len(counts)], tokens, side="right"))
        starts.append(min(len(widths), start + max(multiple, fitting // multiple * multiple)))
    return np.array(starts, np.int64)
