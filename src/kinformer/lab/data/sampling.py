"""The order in which rows and tokens are trained on and evaluated: pure functions of the seed and the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log, log2
from typing import NamedTuple

import numpy as np

from kinformer.lab.data.files import Extents
from kinformer.runtime.errors import KinformerError, plural

# A part of a corpus (train, validation, test) as one stream of token ids.


@dataclass(frozen=True, eq=False)
class Split:
    """The documents of a part of a corpus, end to end, as token ids. ``documents`` holds the position of each
    document's first token, ``corpus`` the name used in messages. A split of bytes has ids 0 to 255. A split of
    tokenizer ids has the bytes that it encodes as ``encoded_from`` and ``marks`` [n, 2]: rising (token position, byte
    position) pairs at which both are exact."""

    name: str
    corpus: str
    extents: Extents
    documents: np.ndarray
    vocab_size: int = 256
    dtype: np.dtype = np.dtype(np.uint8)
    encoded_from: Split | None = None
    marks: np.ndarray | None = None

    @classmethod
    def of_bytes(cls, name: str, corpus: str, extents: Extents) -> Split:
        """Return a split whose tokens are the bytes of ``extents``; each of its pieces is a document."""
        return cls(name, corpus, extents, documents=extents.starts[:-1])

    def __len__(self) -> int:
        return len(self.extents) // self.dtype.itemsize

    @property
    def text(self) -> Split:
        """Return the same part as bytes: the split itself when its tokens are bytes."""
        return self if self.encoded_from is None else self.encoded_from

    @property
    def bytes(self) -> int:
        """Return the bytes of text that the tokens stand for, the denominator of bits per byte."""
        return len(self.text)

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return ids [length] from position ``start`` on, read-only, in the stored dtype (uint8, uint16 or uint32)."""
        width = self.dtype.itemsize
        return np.frombuffer(self.extents.read(start * width, (start + length) * width), self.dtype)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return ids int64 [len(starts), length], one row from each of ``starts`` on."""
        rows = np.empty((len(starts), length), np.int64)
        for row, start in zip(rows, starts.tolist(), strict=True):
            row[:] = self.tokens(start, length)
        return rows

    def document_starts(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return bool [len(starts), length]: which tokens of the rows from ``starts`` on begin a document."""
        marked = np.zeros((len(starts), length), bool)
        lows = np.searchsorted(self.documents, starts)
        highs = np.searchsorted(self.documents, starts + length)
        for row, start, low, high in zip(marked, starts, lows, highs, strict=True):
            row[self.documents[low:high] - start] = True
        return marked

    def take(self, length: int) -> Split:
        """Return the first ``length`` tokens as a split. Of tokenizer ids slightly fewer are taken (or, of a very short
        request, more): up to the nearest mark, so that the bytes are exact."""
        if length >= len(self):
            return self
        size, text, marks = length, None, None
        if self.marks is not None and self.encoded_from is not None:
            last = max(1, int(np.searchsorted(self.marks[:, 0], length, side="right")) - 1)
            marks = self.marks[: last + 1]
            size, text = int(marks[-1, 0]), self.encoded_from.take(int(marks[-1, 1]))
        return replace(
            self,
            extents=self.extents.part(0, size * self.dtype.itemsize),
            documents=self.documents[: np.searchsorted(self.documents, size)],
            encoded_from=text,
            marks=marks,
        )

    def skip(self, length: int) -> Split:
        """Return all but the first ``length`` tokens; of tokenizer ids, all but the tokens of :meth:`take`."""
        head, text, marks = self.take(length), None, None
        cut = len(head)
        if self.marks is not None and self.encoded_from is not None:
            text = self.encoded_from.skip(head.bytes)
            marks = self.marks[np.searchsorted(self.marks[:, 0], cut) :] - (cut, head.bytes)
        return replace(
            self,
            extents=self.extents.part(cut * self.dtype.itemsize, len(self.extents)),
            documents=self.documents[np.searchsorted(self.documents, cut) :] - cut,
            encoded_from=text,
            marks=marks,
        )

    def require(self, tokens: int, purpose: str, remedy: str = "") -> None:
        """Raise a :class:`KinformerError` unless the split holds ``tokens`` tokens, which ``purpose`` needs; ``remedy``
        is what helps beside more data, as in " or a smaller `length`"."""
        if len(self) < tokens:
            raise KinformerError(
                f"split {self.name!r} of {self.corpus} holds {plural(len(self), 'token')} but {purpose} needs "
                f"{tokens}; give more data{remedy}."
            )


# The one protocol of evaluation: files in order, state carried, every token scored once, bits per byte.


class Segment(NamedTuple):
    """A segment: ``tokens`` int64 [streams, n + 1] (inputs and targets), ``valid`` and ``reset`` bool [streams, n]."""

    tokens: np.ndarray
    valid: np.ndarray
    reset: np.ndarray | None


class EvaluationStream:
    """A split as consecutive segments of at most ``length`` predictions; the model's state is carried between them.

    The stream is the split's documents end to end: inputs are tokens 0 to N-2, targets tokens 1 to N-1, and the state
    is not reset where a document begins, unless ``reset_documents``. Nothing predicts the very first token, so it is
    charged log2(vocab_size) bits: every token counts, once, and so does every byte.

    With ``streams`` > 1 the stream is cut into that many contiguous parts that advance in parallel. This is an
    approximation, for speed: each part starts from an empty state and the one token before it. Parts are equal but
    for the last; where it has ended, ``valid`` is False and tokens are 0.
    """

    def __init__(self, split: Split, length: int, streams: int = 1, *, reset_documents: bool = False) -> None:
        split.require(streams + 1, f"measuring in {plural(streams, 'stream')}")
        if length < 1 or streams < 1:
            raise KinformerError(f"length is {length} and streams is {streams} but both must be at least 1.")
        self.split, self.length, self.reset_documents = split, length, reset_documents
        self.predictions = len(split) - 1
        self.part = -(-self.predictions // streams)
        self.starts = np.arange(0, self.predictions, self.part)

    def __len__(self) -> int:
        """Return the number of segments."""
        return -(-self.part // self.length)

    def __iter__(self) -> Iterator[Segment]:
        for offset in range(0, self.part, self.length):
            size = min(self.length, self.part - offset)
            starts = self.starts + offset
            scored = np.clip(self.predictions - starts, 0, size)
            tokens = np.zeros((len(starts), size + 1), np.int64)
            for row, start, count in zip(tokens, starts.tolist(), scored.tolist(), strict=True):
                if count:
                    row[: count + 1] = self.split.tokens(start, count + 1)
            valid = np.arange(size) < scored[:, None]
            reset = self.split.document_starts(starts, size) & valid if self.reset_documents else None
            yield Segment(tokens, valid, reset)

    def bits_per_byte(self, nats: float) -> float:
        """Return bits per byte of text from the summed negative log-likelihoods, in nats, of all predictions."""
        return (nats / log(2) + log2(self.split.vocab_size)) / self.split.bytes


# Pseudo-random order without memory: hashes and permutations, as pure functions of integers.

_ROUNDS = 6


def mix(*words: np.ndarray | int) -> np.ndarray:
    """Hash integers, or arrays of integers (broadcast), to uint64, by SplitMix64's finaliser (Steele et al. 2014)."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = state + _unsigned(word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(index: np.ndarray, count: int, key: np.ndarray | int) -> np.ndarray:
    """Return where a permutation of range(``count``), chosen by ``key``, sends each of ``index``; int64, the same
    shape. A Feistel network permutes the next power of four; walking its cycles until the result lies below ``count``
    keeps it a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Takes no memory beyond the
    answer, whatever ``count``. ``key`` may hold one key per index."""
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
    """Return which of ``count`` examples stands at each ``place`` of endless epochs, whose orders ``key`` chooses."""
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


class Sampler:
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
        """Return ids int64 [batch_size / world, length + 1]: inputs and, one later, targets."""
        return self.split.rows(_share(self.starts(step), rank, world), self.length + 1)

    def resets(self, step: int, rank: int = 0, world: int = 1) -> np.ndarray | None:
        """Return bool [batch_size / world, length], True where a document begins; None without ``reset_documents``."""
        if not self.reset_documents:
            return None
        return self.split.document_starts(_share(self.starts(step), rank, world), self.length)


class RandomWindows(Sampler):
    """Windows of ``length`` + 1 tokens in random order, each token predicted once per epoch. An epoch is a random
    permutation of windows that touch without overlapping, shifted by a random phase; at most ``2 * length`` tokens at
    the ends stay unused in it. Windows may cross documents."""

    def __init__(self, split: Split, batch_size: int, length: int, seed: int, *, reset_documents: bool = False) -> None:
        split.require(length + 1, f"one sequence of length {length}")
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.reset_documents = reset_documents
        self.windows, self._phases = _grid(len(split), length)

    def starts(self, step: int) -> np.ndarray:
        return self.at(step * self.batch_size + np.arange(self.batch_size))

    def at(self, sample: np.ndarray) -> np.ndarray:
        """Return the position of the first token of each row, by its number since the first step."""
        epoch, index = np.divmod(sample, self.windows)
        window = permute(index, self.windows, mix(self.seed, _ORDER, epoch))
        return _phase(self.seed, epoch, self._phases) + window * self.length


class SegmentStreams(Sampler):
    """Consecutive segments of ``batch_size`` contiguous streams, for training with a carried state. The split is cut
    into equal streams, one per row; step by step each row walks along its own. After ``segments`` steps the streams
    begin again, shifted by a random phase. :meth:`resets` marks the first token of each document and of each stream."""

    def __init__(self, split: Split, batch_size: int, length: int, seed: int) -> None:
        split.require(batch_size * length + 1, f"a batch of {plural(batch_size, 'stream')} with segments of {length}")
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.stream_length = (len(split) - 1) // batch_size
        self.segments, self._phases = _grid(self.stream_length + 1, length)

    def starts(self, step: int) -> np.ndarray:
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
    """Return how many windows of ``length`` predictions an epoch over ``tokens`` has, and how many phases."""
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
