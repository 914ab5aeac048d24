"""The masked tokens of an evaluation as rows of a table: each with the text around it and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kinformer.data import IGNORED, BosEos, Tokenizer
from kinformer.runtime.tables import WriteRow
from kinformer.tasks.mlm.rows import MaskedBatch

AROUND = 16
"""Tokens of the text that are shown on either side of a mask."""


class MaskNotes:
    """Writes a row for every masked token: the text around it, the token, the most probable one, its probability."""

    def __init__(self, tokenizer: Tokenizer, ends: BosEos, write: WriteRow) -> None:
        self.tokenizer, self.ends, self.write = tokenizer, ends, write

    def __call__(self, batch: MaskedBatch, logits: Tensor) -> None:
        """Write the rows of a batch, whose masks have the ``logits`` [batch, n, vocab]."""
        shares, best = logits.float().softmax(-1).max(-1)
        for row, tokens in enumerate(batch.tokens):
            masks = batch.labels[row] != IGNORED
            places, labels = batch.positions[row][masks], batch.labels[row][masks]
            tokens = tokens.index_put((places,), labels)
            if batch.valid is not None:
                tokens = tokens[batch.valid[row]]
            text = tokens[self.ends.before : len(tokens) - (self.ends.size - self.ends.before)].tolist()
            columns = (places - self.ends.before, labels, best[row][masks], shares[row][masks])
            for line in self._rows(text, *(column.tolist() for column in columns)):
                self.write(line)

    def _rows(
        self, text: Sequence[int], places: Sequence[int], labels: Sequence[int], best: Sequence[int], shares: Any
    ) -> Iterator[dict[str, Any]]:
        for at, label, guess, share in zip(places, labels, best, shares, strict=True):
            before, after = self._text(text[max(0, at - AROUND) : at]), self._text(text[at + 1 : at + 1 + AROUND])
            token, predicted = self._text([label]), self._text([guess])
            text_around = f"{before}[MASK]{after}"
            right = {"correct": label == guess}  # two bytes that are no text look alike
            yield {"text": text_around, "label": token, "token": predicted, "probability": share} | right

    def _text(self, tokens: Sequence[int]) -> str:
        """Tokens as text; ids that are none of the tokenizer's, such as that of the mask, are left out."""
        return self.tokenizer.decode(
            np.array([token for token in tokens if token < self.tokenizer.vocab_size], np.int64)
        )
