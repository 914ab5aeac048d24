"""A part of a corpus (train, validation, test) as one stream of token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kinformer.data.extents import Extents
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


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
