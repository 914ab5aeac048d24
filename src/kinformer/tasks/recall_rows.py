"""Rows of keys and values for a causal model, and the objective of recalling values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core import state as states
from kinformer.core.figure import ACCURACY, BITS_PER_LABEL, SHARE, Figure
from kinformer.data import IGNORED
from kinformer.data.mqar import Recall, RecallRows
from kinformer.training.data_module import DataModule
from kinformer.training.objective import Outcome
from kinformer.training.settings import Settings


class RecallBatch(NamedTuple):
    """``tokens``, ``labels`` [batch, time] int64, IGNORED where nothing is asked; ``pairs`` [batch] int64."""

    tokens: Tensor
    labels: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, rows: RecallRows) -> RecallBatch:
        """Rows as a batch."""
        return cls(*map(torch.from_numpy, rows))

    @property
    def size(self) -> int:
        """How many tokens are read."""
        return self.tokens.numel()


def accuracy_of(pairs: int) -> Figure:
    """The share of queries that are right, of rows with so many pairs."""
    return Figure(f"accuracy_of_{pairs}_pairs", SHARE, lower_is_better=False)


class RecallData(DataModule):
    """New rows in every step, the same rows in every validation."""

    def __init__(self, data: Recall, settings: Settings) -> None:
        self.data, self.settings = data, settings
        by_pairs = (f"{name}_{number}" for number in data.pairs for name in ("correct", "asked"))
        self.metrics = ("nats", "correct", *by_pairs)
        self.figures = (ACCURACY, BITS_PER_LABEL, *map(accuracy_of, data.pairs))

    @property
    def validations(self) -> int:
        return max(1, self.settings.validation_tokens // (self.settings.batch_size * self.settings.length))

    def batch(self, step: int, rank: int, world: int) -> RecallBatch:
        return self._rows("train", step, self.settings.seed, rank, world)

    def validation(self, rank: int, world: int) -> Iterator[RecallBatch]:
        for part in range(self.validations):
            yield self._rows("validation", part, 0, rank, world)

    def _rows(self, split: str, part: int, seed: int, rank: int, world: int) -> RecallBatch:
        rows = self.data.rows(split, part, self.settings.batch_size, self.settings.length, seed)
        share = self.settings.batch_size // world
        return RecallBatch.of(RecallRows(*(field[rank * share : (rank + 1) * share] for field in rows)))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        figures = {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}
        for number in self.data.pairs:
            asked = means[f"asked_{number}"]
            figures[accuracy_of(number).name] = means[f"correct_{number}"] / asked if asked else float("nan")
        return figures


class RecallLoss:
    """Mean cross-entropy of the values that are asked for; how many are right is counted for each of ``pairs``."""

    reads_hidden = True

    def __init__(self, pairs: Sequence[int]) -> None:
        self.pairs = tuple(pairs)

    def __call__(self, model: Any, batch: RecallBatch, state: Any, progress: float) -> Outcome:
        logits, labels, pairs, state = answers(model, batch, state)
        nats = functional.cross_entropy(logits, labels, reduction="sum")
        right = logits.detach().argmax(-1) == labels
        metrics = {
            "nats": nats.detach(),
            "predicted": torch.full_like(right.sum(), len(labels)),
            "correct": right.sum(),
        }
        for number in self.pairs:
            asked = pairs == number
            metrics |= {f"correct_{number}": (right & asked).sum(), f"asked_{number}": asked.sum()}
        return nats / max(1, len(labels)), metrics, state


def answers(model: Any, batch: RecallBatch, state: Any = None) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Of every query the logits [queries, symbols] in float32, the label, and how many pairs its row has; the state."""
    asked = batch.labels != IGNORED
    inputs, state = model.head_inputs(batch.tokens, state)
    logits = model.logits(states.map_tensors(lambda each: each[asked][None], inputs))[0]
    return logits.float(), batch.labels[asked], batch.pairs[:, None].expand_as(asked)[asked], state
