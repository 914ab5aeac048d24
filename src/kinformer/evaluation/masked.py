"""How well a model finds hidden tokens, and how well counting does on the very same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, log
from typing import Any

import numpy as np
import torch

from kinformer.core.errors import KinformerError
from kinformer.core.model import device_of
from kinformer.data import IGNORED
from kinformer.data.bigrams import Bigrams
from kinformer.data.masked_text import MaskedText
from kinformer.training.batch import Batch
from kinformer.training.objectives_encoder import MaskedLanguage

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class MaskedMeasurement:
    """Of ``masked`` tokens of ``windows``: bits each, the share found, and bits by frequency (``unigram_bits``) and by
    frequency after the true token before it (``bigram_bits``), as counted in the training data."""

    bits: float
    accuracy: float
    masked: int
    windows: int
    unigram_bits: float
    bigram_bits: float


def measure_masked(
    model: Any, text: MaskedText, counts: Bigrams, rows: int, progress: Progress | None = None
) -> MaskedMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which changes nothing else."""
    device, objective = device_of(model), MaskedLanguage()
    sums, baselines, done = np.zeros(3), np.zeros(2), 0
    with torch.inference_mode():
        for shown in text.in_order(rows):
            batch = Batch.of(shown.rows).map(lambda field: field.to(device))
            _, metrics, _ = objective(model, batch, None, 1.0)
            sums += [float(metrics[name]) for name in ("nats", "predicted", "correct")]
            if not isfinite(sums[0]):
                raise KinformerError("the model's predictions are not finite numbers; its weights are damaged.")
            scored = shown.rows.labels != IGNORED
            for index, each in enumerate(counts.probabilities(shown.rows.labels[scored], shown.before[scored])):
                baselines[index] -= np.log2(each).sum()
            done += len(shown.rows.tokens)
            if progress is not None:
                progress(done, len(text))
    nats, masked, correct = sums.tolist()
    unigram, bigram = (baselines / masked).tolist()
    return MaskedMeasurement(
        bits=nats / log(2) / masked,
        accuracy=correct / masked,
        masked=int(masked),
        windows=done,
        unigram_bits=unigram,
        bigram_bits=bigram,
    )
