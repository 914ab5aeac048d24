"""A part of a corpus (train, validation, test) as one stream of token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log, log2
from typing import NamedTuple

import numpy as np

from kinformer.lab.data.files import Extents
from kinformer.runtime.errors import KinformerError, plural


@dataclass(frozen=True, eq=False)
class Split:
    """The documents of a part of a corpus, end to end, as token ids.

    ``documents`` holds the position of each document's first token, ``corpus`` the name used in messages. A split of
    bytes has ids 0 to 255. A split of tokenizer ids has the bytes that it encodes as ``encoded_from`` and ``marks`` [n,
    2]: rising (token position, byte position) pairs at which both are exact.
    """

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
        """Return bool [len(starts), length]: which tokens of the rows from
        ``starts`` on are the first of a document."""
        marked = np.zeros((len(starts), length), bool)
        lows = np.searchsorted(self.documents, starts)
        highs = np.searchsorted(self.documents, starts + length)
        for row, start, low, high in zip(marked, starts, lows, highs, strict=True):
            row[self.documents[low:high] - start] = True
        return marked

    def take(self, length: int) -> Split:
        """Return the first ``length`` tokens as a split.

        Of tokenizer ids slightly fewer are taken (or, of a very short request, more): up to the nearest mark, so that
        the bytes are exact.
        """
        if length >= len(self):
            return self
        if self.marks is None or self.encoded_from is None:
            size, text, marks = length, None, None
        else:
            last = max(1, int(np.searchsorted(self.marks[:, 0], length, side="right")) - 1)
            marks = self.marks[: last + 1]
            size, text = int(marks[-1, 0]), self.encoded_from.take(int(marks[-1, 1]))
        return replace(
            self,
            extents=self.extents.head(size * self.dtype.itemsize),
            documents=self.documents[: np.searchsorted(self.documents, size)],
            encoded_from=text,
            marks=marks,
        )

    def skip(self, length: int) -> Split:
        """Return all but the first ``length`` tokens as a split; of tokenizer ids,
        all but those that :meth:`take` takes."""
        if self.marks is None or self.encoded_from is None:
            cut, text, marks = length, None, None
        else:
            head = self.take(length)
            cut, text = len(head), self.encoded_from.skip(head.bytes)
            marks = self.marks[np.searchsorted(self.marks[:, 0], cut) :] - (cut, head.bytes)
        return replace(
            self,
            extents=self.extents.tail(cut * self.dtype.itemsize),
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
    """A segment: ``tokens`` int64 [streams, n + 1] (inputs and, one later, targets),
    ``valid`` and ``reset`` bool [streams, n]."""

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
