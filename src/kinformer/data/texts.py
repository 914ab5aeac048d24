"""Labelled texts in memory as arrays: their bytes one after the other, no object for each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple, Self

import numpy as np

_BATCH = 1 << 17
"""Bytes of texts that are looked at together: their ids take eight times as much until they are narrowed."""


class Example(NamedTuple):
    """The bytes of a text and the name of its class."""

    text: bytes
    label: str


class Texts:
    """Labelled texts: text i is ``data[ends[i] : ends[i + 1]]``; ``labels`` counts the classes in
    the order of ``names``, which several collections may share. ``order`` (None: all of them) says
    which texts there are, and in what order."""

    def __init__(self, names: dict[str, int]) -> None:
        self.names, self.order = names, None
        self.data, self.ends, self.labels = bytearray(), array("q", [0]), array("q")

    order: np.ndarray | None

    def extend(self, examples: Iterable[Example]) -> None:
        """Add ``examples`` at the end."""
        for text, label in examples:
            self.data += text
            self.ends.append(len(self.data))
            self.labels.append(self.names.setdefault(label, len(self.names)))

    def __len__(self) -> int:
        return len(self.labels) if self.order is None else len(self.order)

    def taken(self, order: np.ndarray) -> Self:
        """Return the texts of the numbers ``order``, with the same bytes behind them."""
        texts = type(self)(self.names)
        texts.data, texts.ends, texts.labels, texts.order = self.data, self.ends, self.labels, order
        return texts

    def by_hash(self) -> np.ndarray:
        """Return the numbers of all texts, in the order of the first 8 bytes of their sha256."""
        digests = np.empty(len(self.labels), np.uint64)
        for index in range(len(digests)):
            digests[index] = int.from_bytes(sha256(self._text(index)).digest()[:8], "big")
        return digests.argsort(kind="stable")

    def batches(self) -> Iterator[list[bytes]]:
        """Yield all texts in order, some at a time."""
        batch: list[bytes] = []
        size = 0
        for index in range(len(self.labels)) if self.order is None else map(int, self.order):
            batch.append(self._text(index))
            size += len(batch[-1])
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def classes(self) -> np.ndarray:
        """Return the number of each text's class in ``names``, int64."""
        labels = np.frombuffer(self.labels, np.int64)
        return labels if self.order is None else labels[self.order]

    def _text(self, index: int) -> bytes:
        return bytes(memoryview(self.data)[self.ends[index] : self.ends[index + 1]])
