"""Windows or segments of text with what followed each token's neighbours in a store (SPALM, Yogatama et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kinformer.data import Corpus
from kinformer.training.batch import Batch
from kinformer.training.feeds import NextTokens
from kinformer.training.settings import Settings


class RetrievedTokens(NextTokens):
    """:class:`NextTokens` whose batches have ``neighbours``.

    ``train`` and ``validation``, int32 [tokens, k]: row t belongs to the input at position t of the training split, and
    of the part of the validation split that is measured.
    """

    def __init__(self, corpus: Corpus, settings: Settings, train: np.ndarray, validation: np.ndarray) -> None:
        super().__init__(corpus, settings)
        self.train, self.held_out = train, validation
        for table, split in ((train, corpus.splits["train"]), (validation, self.stream.split)):
            assert len(table) == len(split) - 1

    def batch(self, step: int, rank: int, world: int) -> Batch:
        batch = super().batch(step, rank, world)
        return _with_rows(batch, self.train, self.sampler.starts(step), rank)

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        for index, batch in enumerate(super().validation(rank, world)):
            yield _with_rows(batch, self.held_out, self.stream.starts + index * self.stream.length, rank)


def _with_rows(batch: Batch, table: np.ndarray, starts: np.ndarray, rank: int) -> Batch:
    """``batch`` with its rows of ``table``; ``starts`` are the positions of all processes' rows, the last of which may
    be fewer than the others'."""
    count, time = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    rows = np.full((count, time, table.shape[1]), -1, np.int64)
    for row, start in zip(rows, starts[rank * count : (rank + 1) * count].tolist(), strict=False):
        found = table[start : start + time]
        row[: len(found)] = found
    neighbours: Tensor = torch.from_numpy(rows)
    return batch._replace(neighbours=neighbours)
