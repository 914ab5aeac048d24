"""Rows of keys and values for a causal model, and the objective of recalling values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import numpy as np
from torch import Tensor

from kinformer.data.mqar import Recall
from kinformer.tasks.shared.answer_rows import AnswersLoss, MadeRows, ScoredBatch
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL, SHARE, Metric
from kinformer.training.settings import Settings


def accuracy_of(pairs: int) -> Metric:
    """Return the metric of the share of queries that are right, of rows with this many pairs."""
    return Metric(f"accuracy_of_{pairs}_pairs", SHARE, lower_is_better=False)


class RecallData(MadeRows):
    """Rows of training's length, and their accuracy by the number of pairs."""

    data: Recall

    def __init__(self, data: Recall, settings: Settings) -> None:
        super().__init__(data, settings)
        by_pairs = (f"{name}_{number}" for number in data.pairs for name in ("correct", "asked"))
        self.sums = ("nats", "correct", *by_pairs)
        self.metrics = (ACCURACY, BITS_PER_LABEL, *map(accuracy_of, data.pairs))

    @property
    def width(self) -> int:
        return self.settings.length

    def made(self, split: str, part: int, seed: int) -> tuple[np.ndarray, ...]:
        return self.data.rows(split, part, self.settings.batch_size, self.settings.length, seed)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        metrics = {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}
        for number in self.data.pairs:
            scored = means[f"asked_{number}"]
            metrics[accuracy_of(number).name] = means[f"correct_{number}"] / scored if scored else float("nan")
        return metrics


class RecallLoss(AnswersLoss):
    """The mean cross-entropy of the queried values; its metrics count the right ones for each of ``pairs``."""

    def __init__(self, pairs: Sequence[int]) -> None:
        self.pairs = tuple(pairs)

    def counted(self, batch: ScoredBatch, rows: Tensor, right: Tensor) -> dict[str, Tensor]:
        counts: dict[str, Tensor] = {}
        pairs = batch.sizes[rows]
        for number in self.pairs:
            scored = pairs == number
            counts |= {f"correct_{number}": (right & scored).sum(), f"asked_{number}": scored.sum()}
        return counts
