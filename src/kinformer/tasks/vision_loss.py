"""The objective of telling the classes of images, which may be mixed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.data import IGNORED
from kinformer.tasks.vision_rows import ImageBatch
from kinformer.training.objective import Outcome


class ImageClassification:
    """Mean cross-entropy of every image's label, smoothed by ``smoothing`` in training; of two that were mixed, of both
    labels by their shares (Zhang et al. 2017, mixup)."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: ImageBatch, state: object, progress: float) -> Outcome:
        logits = model(batch.images).float()
        loss = self.loss(logits, batch, self.smoothing if model.training else 0.0)
        return loss, counted(logits.detach(), batch), None

    def loss(self, logits: Tensor, batch: ImageBatch, smoothing: float) -> Tensor:
        """Of logits [rows, classes]."""
        first = _of(logits, batch.labels, smoothing)
        if batch.others is None or batch.shares is None:
            known = (batch.labels != IGNORED).sum()
            return first.sum() / known.clamp_min(1)
        return (batch.shares * first + (1 - batch.shares) * _of(logits, batch.others, smoothing)).mean()


def counted(logits: Tensor, batch: ImageBatch) -> dict[str, Tensor]:
    """Metrics of logits [rows, classes]: of mixed images, by the label that has the larger share."""
    labels = batch.labels
    if batch.others is not None and batch.shares is not None:
        labels = torch.where(batch.shares >= 0.5, labels, batch.others)
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return {"nats": nats, "predicted": (labels != IGNORED).sum(), "correct": (logits.argmax(-1) == labels).sum()}


def _of(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
