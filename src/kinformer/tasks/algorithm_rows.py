"""Rows of an algorithm for a causal model, and the objective of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core import state as states
from kinformer.core.figure import ACCURACY, BITS_PER_LABEL, SEQUENCE_ACCURACY
from kinformer.data import IGNORED
from kinformer.data.algorithms import AlgorithmData, AlgorithmRows
from kinformer.training.data_module import DataModule
from kinformer.training.objective import Outcome
from kinformer.training.settings import Settings


class AlgorithmBatch(NamedTuple):
    """As ``data.algorithms.AlgorithmRows``."""

    tokens: Tensor
    labels: Tensor
    valid: Tensor
    digits: Tensor

    @classmethod
    def of(cls, rows: AlgorithmRows) -> AlgorithmBatch:
        """Rows as a batch."""
        return cls(*map(torch.from_numpy, rows))

    @property
    def size(self) -> int:
        """How many tokens are read, padding included."""
        return self.tokens.numel()


class AlgorithmModule(DataModule):
    """New rows in every step, the same rows in every validation."""

    metrics = ("nats", "correct", "solved", "problems")
    figures = (ACCURACY, SEQUENCE_ACCURACY, BITS_PER_LABEL)

    def __init__(self, data: AlgorithmData, settings: Settings) -> None:
        self.data, self.settings = data, settings

    @property
    def validations(self) -> int:
        return max(1, self.settings.validation_tokens // (self.settings.batch_size * self.data.width()))

    def batch(self, step: int, rank: int, world: int) -> AlgorithmBatch:
        return self._rows("train", step, self.settings.seed, rank, world)

    def validation(self, rank: int, world: int) -> Iterator[AlgorithmBatch]:
        for part in range(self.validations):
            yield self._rows("validation", part, 0, rank, world)

    def _rows(self, split: str, part: int, seed: int, rank: int, world: int) -> AlgorithmBatch:
        rows = self.data.rows(split, part, self.settings.batch_size, seed)
        share = self.settings.batch_size // world
        return AlgorithmBatch.of(AlgorithmRows(*(field[rank * share : (rank + 1) * share] for field in rows)))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {
            ACCURACY.name: means["correct"],
            SEQUENCE_ACCURACY.name: means["solved"] / means["problems"],
            BITS_PER_LABEL.name: means["nats"] / log(2),
        }


class AlgorithmLoss:
    """Mean cross-entropy of the answers' tokens, each predicted from the right ones before it."""

    reads_hidden = True

    def __call__(self, model: Any, batch: AlgorithmBatch, state: Any, progress: float) -> Outcome:
        logits, labels, rows, state = answers(model, batch, state)
        nats = functional.cross_entropy(logits, labels, reduction="sum")
        right = logits.detach().argmax(-1) == labels
        metrics = {
            "nats": nats.detach(),
            "predicted": torch.full_like(right.sum(), len(labels)),
            "correct": right.sum(),
            "solved": solved(right, rows, len(batch.tokens)).sum(),
            "problems": torch.full_like(right.sum(), len(batch.tokens)),
        }
        return nats / max(1, len(labels)), metrics, state


def answers(model: Any, batch: AlgorithmBatch, state: Any = None) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Of every token of an answer the logits [tokens, symbols] in float32, the label and the row; the state after."""
    asked = batch.labels != IGNORED
    inputs, state = model.head_inputs(batch.tokens, state, valid=batch.valid)
    logits = model.logits(states.map_tensors(lambda each: each[asked][None], inputs))[0]
    return logits.float(), batch.labels[asked], asked.nonzero()[:, 0], state


def solved(right: Tensor, rows: Tensor, count: int) -> Tensor:
    """Which of ``count`` rows [count] bool have every token of the answer right: those that greedy decoding solves."""
    return torch.ones(count, dtype=torch.bool, device=right.device).index_put((rows[~right],), right.new_zeros(()))
