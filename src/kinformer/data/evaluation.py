"""The one protocol of evaluation: files in order, state carried, every token scored once, bits per byte."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, log2
from typing import NamedTuple

import numpy as np

from kinformer.data.split import Split
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


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
