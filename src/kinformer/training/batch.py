"""What an objective is given: rows of tokens, and what else is known of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.data import Rows


class Batch(NamedTuple):
    """Rows for a causal model: ``tokens`` [batch, time + 1] int64, inputs and, one apart, targets; ``reset`` and
    ``valid`` [batch, time] bool or None.

    For an encoder, ``labels`` are there: tokens and valid are [batch, time], and the labels int64 [batch] of rows, or
    [batch, n] of the tokens at ``places`` [batch, n] (of all in order if None), IGNORED where there are fewer.

    ``neighbours`` [batch, time, k] int64 are for a causal model that is given what a store holds (see ``retrieved``).
    """

    tokens: Tensor
    reset: Tensor | None = None
    valid: Tensor | None = None
    labels: Tensor | None = None
    places: Tensor | None = None
    neighbours: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows) -> Batch:
        """Rows for an encoder."""
        tokens, valid, labels, places = (None if field is None else torch.from_numpy(field) for field in rows)
        assert tokens is not None
        return cls(tokens, None, valid, labels, places)

    @property
    def size(self) -> int:
        """How many tokens a causal model predicts, or an encoder reads."""
        rows, width = self.tokens.shape
        return rows * (width - 1 if self.labels is None else width)

    def rows(self, part: slice) -> Batch:
        """Some of its rows."""
        return self.map(lambda field: field[part])

    def map(self, change: Any) -> Batch:
        """``change`` of every tensor."""
        others = (None if field is None else change(field) for field in self[1:])
        return Batch(change(self.tokens), *others)
