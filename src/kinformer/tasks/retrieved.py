"""Rows of text with what followed each token's neighbours in a store (SPALM, Yogatama et al. 2021), for a head that
makes something of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.tasks.next_token import BITS_PER_BYTE
from kinformer.tasks.next_token_rows import NextTokens, TokenBatch, next_token_nats, predicted
from kinformer.training.data_module import DataModule
from kinformer.training.objective import Outcome


class RetrievedBatch(NamedTuple):
    """A :class:`TokenBatch` and ``neighbours`` [batch, time, k] int64, the tokens that followed, -1 where is none."""

    tokens: Tensor
    reset: Tensor | None
    valid: Tensor | None
    neighbours: Tensor

    @property
    def size(self) -> int:
        """How many tokens are predicted."""
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)


class RetrievedTokens(DataModule):
    """The rows of ``texts`` with their neighbours.

    ``train`` and ``validation``, int32 [tokens, k]: row t belongs to the input at position t of the training split, and
    of the part of the validation split that is measured.
    """

    figures = (BITS_PER_BYTE,)

    def __init__(self, texts: NextTokens, train: np.ndarray, validation: np.ndarray) -> None:
        self.texts, self.train, self.held_out, self.carries = texts, train, validation, texts.carries
        for table, split in ((train, texts.corpus.splits["train"]), (validation, texts.stream.split)):
            assert len(table) == len(split) - 1

    @property
    def validations(self) -> int:
        return self.texts.validations

    def batch(self, step: int, rank: int, world: int) -> RetrievedBatch:
        batch = self.texts.batch(step, rank, world)
        return _with_rows(batch, self.train, self.texts.sampler.starts(step), rank)

    def validation(self, rank: int, world: int) -> Iterator[RetrievedBatch]:
        stream = self.texts.stream
        for index, batch in enumerate(self.texts.validation(rank, world)):
            yield _with_rows(batch, self.held_out, stream.starts + index * stream.length, rank)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return self.texts.measured(means, split)


class RetrievedNextToken:
    """Cross-entropy of each next token where the head is given the neighbours of every token."""

    reads_hidden = True

    def __call__(self, model: Any, batch: RetrievedBatch, state: Any, progress: float) -> Outcome:
        hidden, state, _ = model.hidden(batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset)
        logits = model.head(hidden, model.input, neighbours=batch.neighbours)
        loss, nats = next_token_nats(logits, batch.tokens[:, 1:], batch.valid)
        return loss, {"nats": nats, "predicted": predicted(batch)}, state


def _with_rows(batch: TokenBatch, table: np.ndarray, starts: np.ndarray, rank: int) -> RetrievedBatch:
    """``batch`` with its rows of ``table``; ``starts`` are the positions of all processes' rows, the last of which may
    be fewer than the others'."""
    count, time = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    rows = np.full((count, time, table.shape[1]), -1, np.int64)
    for row, start in zip(rows, starts[rank * count : (rank + 1) * count].tolist(), strict=False):
        found = table[start : start + time]
        row[: len(found)] = found
    return RetrievedBatch(*batch, torch.from_numpy(rows))
