"""Batches of examples of similar length, with little padding, in an order computed without memory.

The order is a pure function of (seed, step), as in the other samplers. Process ``rank`` of ``world`` gets its slice of
a step's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kinformer.lab.data.labelled import Examples
from kinformer.lab.data.sampling import in_epochs, mix, permute
from kinformer.runtime.errors import KinformerError

_BUCKET_ORDER, _BATCHES = 4, 5
POOL = 32
STEP_OF_WIDTH = 64
IGNORED = -100


class Rows(NamedTuple):
    """The rows of an encoder's batch: ``tokens`` int64 [rows, time], ``valid`` bool [rows, time] or None (all valid).
    ``labels``: int64, [rows] of whole rows, or [rows, n] of the tokens at ``positions`` int64 [rows, n] (of all tokens
    in order where ``positions`` is None). IGNORED labels do not count."""

    tokens: np.ndarray
    valid: np.ndarray | None
    labels: np.ndarray
    positions: np.ndarray | None = None

    def share(self, rank: int, world: int) -> Rows:
        """Return a process's rows, the same number for every process; rows repeated for this have IGNORED labels."""
        size = -(-len(self.tokens) // world)
        index = np.arange(rank * size, (rank + 1) * size)
        within = np.minimum(index, len(self.tokens) - 1)
        present = (index < len(self.tokens)).reshape(-1, *[1] * (self.labels.ndim - 1))
        labels = np.where(present, self.labels[within], IGNORED)
        valid, positions = (None if field is None else field[within] for field in (self.valid, self.positions))
        return Rows(self.tokens[within], valid, labels, positions)


class BosEos(NamedTuple):
    """The tokens that begin and end every row, as a model expects them; None stands for no token."""

    bos: int | None = None
    eos: int | None = None

    @property
    def size(self) -> int:
        """Return how many tokens of a row the two take."""
        return (self.bos is not None) + (self.eos is not None)

    @property
    def before(self) -> int:
        """Return how many tokens stand before the text."""
        return int(self.bos is not None)


NO_ENDS = BosEos()


def lay(texts: list[np.ndarray], ends: BosEos, width: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ``texts`` between BOS and EOS, as tokens int64 [texts, width] and valid, None where every token is."""
    tokens = np.zeros((len(texts), width), np.int64)
    lengths = np.array([len(text) + ends.size for text in texts])
    for row, text in zip(tokens, texts, strict=True):
        row[ends.before : ends.before + len(text)] = text
        if ends.bos is not None:
            row[0] = ends.bos
        if ends.eos is not None:
            row[ends.before + len(text)] = ends.eos
    valid = np.arange(width) < lengths[:, None]
    return tokens, None if valid.all() else valid


class Order:
    """The order of examples of these ``lengths``: which are in the batch of a step, each once per epoch. A pool of
    ``POOL`` batches of the shuffled epochs is sorted by length and its batches are shuffled again."""

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self._pool: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def indices(self, step: int) -> np.ndarray:
        """Return the examples of the global batch, int64 [batch_size]."""
        number, batch = divmod(step, POOL)
        if self._pool[0] != number:
            self._pool = number, self._sorted(number)
        index = permute(np.array([batch]), POOL, mix(self.seed, _BATCHES, number))[0]
        return self._pool[1][index * self.batch_size : (index + 1) * self.batch_size]

    def batches(self, limit: int | None = None) -> Iterator[np.ndarray]:
        """Yield the first ``limit`` examples (or all), each once, the short ones first."""
        order = np.argsort(self.lengths[:limit], kind="stable")
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def _sorted(self, number: int) -> np.ndarray:
        size = POOL * self.batch_size
        order = in_epochs(number * size + np.arange(size), len(self.lengths), self.seed, _BUCKET_ORDER)
        return order[np.argsort(self.lengths[order], kind="stable")]


class Buckets(Order):
    """The batches of ``examples``, each example once per epoch, cut to ``length`` tokens with BOS and EOS."""

    def __init__(self, examples: Examples, batch_size: int, length: int, seed: int, ends: BosEos = NO_ENDS) -> None:
        if length <= ends.size:
            raise KinformerError(f"`length` {length}: leaves no room beside BOS and EOS; give more.")
        super().__init__(np.minimum(examples.lengths + ends.size, length), batch_size, seed)
        self.examples, self.length, self.ends = examples, length, ends

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Rows:
        """Return this process's rows, as wide as the longest of the global batch needs."""
        indices = self.indices(step)
        size = len(indices) // world
        return self.rows(indices[rank * size : (rank + 1) * size], self._width(indices))

    def in_order(self, limit: int | None = None) -> Iterator[Rows]:
        """Yield the first ``limit`` examples (or all), each once, the short ones first."""
        for indices in self.batches(limit):
            yield self.rows(indices, self._width(indices))

    def rows(self, indices: np.ndarray, width: int) -> Rows:
        """Return some examples, laid out ``width`` tokens wide."""
        room = self.length - self.ends.size
        texts = [self.examples.tokens(index)[:room] for index in indices.tolist()]
        return Rows(*lay(texts, self.ends, width), np.asarray(self.examples.labels[indices]))

    def _width(self, indices: np.ndarray) -> int:
        """Return the width of a batch, one of few: a sparse pattern is planned again for each."""
        longest = int(self.lengths[indices].max())
        return min(self.length, -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH)


_TIES, _TOKEN_ORDER = 8, 9


class TokenBatches:
    """Batches of pairs of similar length, as many as fit into a number of tokens.

    The batches are a pure function of (seed, step), as in the other samplers. Pairs are sorted by the longer of their
    sides. Where a batch ends depends on the lengths alone. The order of pairs of one length and the order of the
    batches depend on the epoch.

    ``widths`` [pairs] are the tokens of the pairs. A batch has rows x width <= ``tokens``, and a multiple of
    ``multiple`` rows.
    """

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
        """Return the pairs of batch number ``step``, int64; the last batch is filled up with its first pairs."""
        epoch, number = divmod(step, self.batches)
        if self._epoch[0] != epoch:
            ties = mix(self.seed, _TIES, epoch, np.arange(len(self.widths)))
            self._epoch = epoch, np.lexsort((ties, self.widths))
        batch = permute(np.array([number]), self.batches, mix(self.seed, _TOKEN_ORDER, epoch))[0]
        result = self._epoch[1][self.starts[batch] : self.starts[batch + 1]]
        # Repeats the pairs from the first on, up to a multiple.
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
