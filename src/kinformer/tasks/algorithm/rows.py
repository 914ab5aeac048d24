"""Rows of an algorithm for a causal model, and the objective of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import numpy as np
import torch
from torch import Tensor

from kinformer.data.algorithms import AlgorithmData
from kinformer.tasks.shared.answer_rows import AnswersLoss, MadeRows, ScoredBatch
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL, SEQUENCE_ACCURACY


class AlgorithmModule(MadeRows):
    """Rows as long as the longest problem with its answer."""

    data: AlgorithmData
    sums = ("nats", "correct", "solved", "problems")
    metrics = (ACCURACY, SEQUENCE_ACCURACY, BITS_PER_LABEL)

    @property
    def width(self) -> int:
        return self.data.width()

    def made(self, split: str, part: int, seed: int) -> tuple[np.ndarray, ...]:
        return self.data.rows(split, part, self.settings.batch_size, seed)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {
            ACCURACY.name: means["correct"],
            SEQUENCE_ACCURACY.name: means["solved"] / means["problems"],
            BITS_PER_LABEL.name: means["nats"] / log(2),
        }


class AlgorithmLoss(AnswersLoss):
    """The mean cross-entropy of all tokens of the answers; its metrics also count the problems that are solved."""

    def counted(self, batch: ScoredBatch, rows: Tensor, right: Tensor) -> dict[str, Tensor]:
        problems = len(batch.tokens)
        return {
            "solved": solved(right, rows, problems).sum(),
            "problems": torch.full_like(right.sum(), problems),
        }


def solved(right: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return which of ``count`` rows, [count] bool, have every token of the answer right: greedy decoding solves
    them."""
    return torch.ones(count, dtype=torch.bool, device=right.device).index_put((rows[~right],), right.new_zeros(()))
