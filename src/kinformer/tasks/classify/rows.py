"""Rows of labelled examples for an encoder, and the objective of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.data import IGNORED, BosEos, Buckets, Labelled, Rows
from kinformer.training.batch import stretch_of_rows
from kinformer.training.data_module import DataModule
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings

LEAST_EXAMPLES = 256


class LabelledBatch(NamedTuple):
    """``tokens`` [batch, time] int64, ``valid`` bool or None, and the ``labels`` int64 [batch] of rows, or [batch,
    time] of tokens; IGNORED labels do not count."""

    tokens: Tensor
    valid: Tensor | None
    labels: Tensor

    @classmethod
    def of(cls, rows: Rows) -> LabelledBatch:
        """Make a batch of padded rows and their labels."""
        valid = None if rows.valid is None else torch.from_numpy(rows.valid)
        return cls(torch.from_numpy(rows.tokens), valid, torch.from_numpy(rows.labels))

    @property
    def size(self) -> int:
        """The number of tokens that are read, padding included."""
        return self.tokens.numel()

    def stretch(self, number: int, count: int) -> LabelledBatch:
        """Return stretch ``number`` of ``count`` of the rows' time; labels of whole rows count in every row once."""
        tokens, valid = stretch_of_rows(self.tokens, self.valid, number, count)
        if self.labels.dim() > 1:
            lacking = tokens.shape[1] * count - self.tokens.shape[1]
            labels = functional.pad(self.labels, (0, lacking), value=IGNORED)
            return LabelledBatch(tokens, valid, labels[:, number * tokens.shape[1] : (number + 1) * tokens.shape[1]])
        here = torch.arange(len(tokens), device=tokens.device) % count == number
        return LabelledBatch(tokens, valid, self.labels.masked_fill(~here, IGNORED))


class Labels(DataModule):
    """Examples with their classes. Validation: the first ones, of as many tokens as the settings say, 256 at least."""

    sums = ("nats", "correct")
    by_time = True
    metrics = (ACCURACY, BITS_PER_LABEL)

    def __init__(self, data: Labelled, settings: Settings, ends: BosEos) -> None:
        sizes = settings.batch_size, settings.length, settings.seed
        self.train, self.held_out = (Buckets(data.splits[name], *sizes, ends) for name in ("train", "validation"))
        enough = int(np.searchsorted(np.cumsum(self.held_out.lengths), settings.validation_tokens)) + 1
        self.examples = min(len(self.held_out.lengths), max(LEAST_EXAMPLES, enough))

    @property
    def validations(self) -> int:
        return -(-self.examples // self.held_out.batch_size)

    def batch(self, step: int, rank: int, world: int) -> LabelledBatch:
        return LabelledBatch.of(self.train.batch(step, rank, world))

    def validation(self, rank: int, world: int) -> Iterator[LabelledBatch]:
        for rows in self.held_out.in_order(self.examples):
            yield LabelledBatch.of(rows.share(rank, world))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}


class Classification:
    """Mean cross-entropy of the label of every row, or of every token where the model predicts classes of those."""

    by_token = True

    def __call__(self, model: nn.Module, batch: LabelledBatch, state: object, progress: float) -> ObjectiveOutput:
        return scored(model(batch.tokens, valid=batch.valid), batch.labels)


def scored(logits: Tensor, labels: Tensor) -> ObjectiveOutput:
    """Return loss, metrics and no state from logits [..., classes] and labels [...]; ``correct`` counts the labels that
    are the most probable classes."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten()
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    counted = (labels != IGNORED).sum()
    correct = (logits.detach().argmax(-1) == labels).sum()
    return nats / counted.clamp_min(1), {"nats": nats.detach(), "predicted": counted, "correct": correct}, None
