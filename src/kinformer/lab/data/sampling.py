"""The order in which rows and tokens are trained on and evaluated: pure functions of the seed and the step."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kinformer.lab.data.split import Split
from kinformer.runtime.errors import KinformerError, plural

# Pseudo-random order without memory: hashes and permutations that are pure functions of integers.

_ROUNDS = 6


def mix(*words: np.ndarray | int) -> np.ndarray:
    """Hash integers (or arrays of them, broadcast) to uint64, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = state + _unsigned(word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(index: np.ndarray, count: int, key: np.ndarray | int) -> np.ndarray:
    """Return where a permutation of range(``count``), chosen by ``key``, sends each of ``index``; int64, the same
    shape.

    A Feistel network permutes the next power of four; walking its cycles until the result lies below ``count``
    keeps it a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Takes no memory beyond
    the answer, whatever ``count``. ``key`` may hold one key per index.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    image = np.array(index, np.uint64)
    keys = np.broadcast_to(_unsigned(key), image.shape)
    outside = np.ones(image.shape, bool)
    # Cycle walking: the range is less than four times ``count``, so few steps are needed on average.
    while outside.any():
        image[outside] = _feistel(image[outside], half, keys[outside])
        outside = image >= count
    return image.astype(np.int64)


def in_epochs(place: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return which of ``count`` examples stands at each ``place`` of an order without end, in which every epoch has
    each once, in an order of its own; ``key`` chooses them."""
    epoch, index = np.divmod(place, count)
    return permute(index, count, mix(*key, epoch))


def _feistel(value: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for turn in range(_ROUNDS):
        # A Feistel round is invertible whatever the round function is.
        left, right = right, left ^ (mix(keys, turn, right) & mask)
    return (left << shift) | right


def _unsigned(word: np.ndarray | int) -> np.ndarray:
    if isinstance(word, np.ndarray):
        return word.astype(np.uint64)
    return np.array([int(word) & 0xFFFFFFFFFFFFFFFF], np.uint64)


# The tokens of a training step: a pure function of (seed, step), the same for every number of processes.
#
# To resume a run, the step number suffices. A step's *global* batch does not depend on how many processes share it;
# process ``rank`` of ``world`` gets its ``rank``-th contiguous slice of rows.

_PHASE, _ORDER = 1, 2


class Sampler(Protocol):
    """The interface of a trainer's data: the rows of a step, and where sequences begin in them."""

    def batch(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return ids int64 [batch_size / world, length + 1]; inputs are all but the
        last column, targets all but the first."""
        ...

    def resets(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray | None:
        """Return bool [batch_size / world, length]: inputs at which a new sequence
        begins; None if there is no such mark."""
        ...


class Rows:
    """The batches of rows of a ``split``, each ``length`` + 1 tokens from where a subclass's :meth:`starts` says. With
    ``reset_documents`` the first token of each document is marked by :meth:`resets`."""

    split: Split
    batch_size: int
    length: int
    seed: int
    reset_documents = False

    def starts(self, step: int) -> np.ndarray:
        """Return the position of the first token of each row of the global batch, int64 [batch_size]."""
        raise NotImplementedError

    def batch(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return ids int64 [batch_size / world, length + 1]."""
        return self.split.rows(_share(self.starts(step), rank, world), self.length + 1)

    def resets(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray | None:
        """Return bool [batch_size / world, length], True at the first token of a
        document; None without ``reset_documents``."""
        if not self.reset_documents:
            return None
        return self.split.document_starts(_share(self.starts(step), rank, world), self.length)


class RandomWindows(Rows):
    """Windows of ``length`` + 1 tokens in random order, each token predicted once per epoch.

    An epoch is a random permutation of windows that touch without overlapping, shifted by a random phase; at most
    ``2 * length`` tokens at the ends stay unused in it. Windows may cross documents.
    """

    def __init__(self, split: Split, batch_size: int, length: int, seed: int, *, reset_documents: bool = False) -> None:
        split.require(length + 1, f"one sequence of length {length}")
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.reset_documents = reset_documents
        self.windows, self._phases = _grid(len(split), length)

    def starts(self, step: int) -> np.ndarray:
        """Return the position of the first token of each row of the global batch, int64 [batch_size]."""
        return self.at(step * self.batch_size + np.arange(self.batch_size))

    def at(self, sample: np.ndarray) -> np.ndarray:
        """Return the position of the first token of each row, by its number since the first step."""
        epoch, index = np.divmod(sample, self.windows)
        window = permute(index, self.windows, mix(self.seed, _ORDER, epoch))
        return _phase(self.seed, epoch, self._phases) + window * self.length


class SegmentStreams(Rows):
    """Consecutive segments of ``batch_size`` contiguous streams, for training with a carried state.

    The split is cut into equal streams, one per row; step by step each row walks along its own. After ``segments``
    steps the streams begin again, shifted by a random phase. :meth:`resets` marks the first token of each document
    and that of each stream.
    """

    def __init__(self, split: Split, batch_size: int, length: int, seed: int) -> None:
        split.require(batch_size * length + 1, f"a batch of {plural(batch_size, 'stream')} with segments of {length}")
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.stream_length = (len(split) - 1) // batch_size
        self.segments, self._phases = _grid(self.stream_length + 1, length)

    def starts(self, step: int) -> np.ndarray:
        """Return the position of the first token of each row of the global batch, int64 [batch_size]."""
        epoch, segment = divmod(step, self.segments)
        phase = _phase(self.seed, np.array([epoch]), self._phases)
        return np.arange(self.batch_size) * self.stream_length + phase + segment * self.length

    def resets(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return bool [batch_size / world, length], True at the first token of a document or of a stream."""
        resets = self.split.document_starts(_share(self.starts(step), rank, world), self.length)
        if step % self.segments == 0:
            resets[:, 0] = True
        return resets


def _grid(tokens: int, length: int) -> tuple[int, int]:
    """Return how many windows of ``length`` predictions an epoch over ``tokens``
    tokens has, and how many phases it allows."""
    windows = max(1, (tokens - length) // length)
    return windows, min(length, tokens - windows * length)


def _phase(seed: int, epoch: np.ndarray, phases: int) -> np.ndarray:
    return (mix(seed, _PHASE, epoch) % np.uint64(phases)).astype(np.int64)


def _share(rows: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Return the share of the ``rows`` of a batch that process ``rank`` of ``world`` has."""
    if len(rows) % world:
        raise KinformerError(
            f"a batch of {plural(len(rows), 'row')} cannot be shared by {plural(world, 'process')} alike; give a "
            f"multiple of {world}."
        )
    size = len(rows) // world
    return rows[rank * size : (rank + 1) * size]
