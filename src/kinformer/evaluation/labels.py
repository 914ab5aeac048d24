"""How well a model tells the classes of examples, class by class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, log
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kinformer.core.errors import KinformerError
from kinformer.core.model import device_of
from kinformer.data import Buckets
from kinformer.training.batch import Batch

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LabelMeasurement:
    """``bits`` per label; of each class how many ``examples`` it has, for how many it was ``told``, and rightly so."""

    bits: float
    examples: tuple[int, ...]
    told: tuple[int, ...]
    correct: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        """The share of examples whose class was told."""
        return sum(self.correct) / sum(self.examples)

    @property
    def guessing(self) -> float:
        """The share of the most frequent class: the accuracy of always telling that one."""
        return max(self.examples) / sum(self.examples)


def measure_labels(model: Any, rows: Buckets, classes: int, progress: Progress | None = None) -> LabelMeasurement:
    """Measure ``model`` (in eval mode) on all examples of ``rows``."""
    device = device_of(model)
    counts, nats = np.zeros((3, classes), np.int64), 0.0
    with torch.inference_mode():
        for some in rows.in_order():
            batch = Batch.of(some)
            valid = None if batch.valid is None else batch.valid.to(device)
            logits = model(batch.tokens.to(device), valid=valid).float().cpu()
            nats += float(functional.cross_entropy(logits, torch.from_numpy(some.labels), reduction="sum"))
            if not isfinite(nats):
                raise KinformerError("the model's predictions are not finite numbers; its weights are damaged.")
            told = logits.argmax(-1).numpy()
            right = some.labels[told == some.labels]
            counts += np.stack([np.bincount(each, minlength=classes) for each in (some.labels, told, right)])
            if progress is not None:
                progress(int(counts[0].sum()), len(rows.examples))
    examples, answers, correct = (tuple(row) for row in counts.tolist())
    return LabelMeasurement(bits=nats / log(2) / sum(examples), examples=examples, told=answers, correct=correct)
