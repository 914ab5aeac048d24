"""The objective of telling the classes of images, which may be mixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.data import IGNORED
from kinformer.tasks.vision.options import VisionOptions
from kinformer.tasks.vision.rows import ImageBatch
from kinformer.training.objective import ObjectiveOutput


class ImageClassification:
    """Mean cross-entropy of every image's label, smoothed by ``smoothing`` in training; of two that were mixed, of both
    labels by their shares (Zhang et al. 2017, mixup)."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: ImageBatch, state: object, progress: float) -> ObjectiveOutput:
        logits = model(batch.images).float()
        heads = logits.unbind(1) if logits.dim() == 3 else (logits,)
        smoothing = self.smoothing if model.training else 0.0
        loss = torch.stack([self.loss(head, batch, smoothing) for head in heads]).mean()
        return loss, counted(logits.detach(), batch), None

    def loss(self, logits: Tensor, batch: ImageBatch, smoothing: float) -> Tensor:
        """Return the mean loss of ``logits`` [rows, classes], a scalar."""
        first = _of(logits, batch.labels, smoothing)
        if batch.others is None or batch.shares is None:
            labelled = (batch.labels != IGNORED).sum()
            return first.sum() / labelled.clamp_min(1)
        return (batch.shares * first + (1 - batch.shares) * _of(logits, batch.others, smoothing)).mean()


class Distillation(ImageClassification):
    """(1 - weight) * cross-entropy of the label + weight * what the teacher says of the same image (DeiT, section 4).

    ``hard``: the cross-entropy of the class that it finds most probable; ``soft``: temperature^2 * KL(teacher ||
    student) of both at that temperature. A model with two heads learns the label by the first and this by the second.
    Where nothing is learnt, as in validation, it is the plain cross-entropy.
    """

    def __init__(self, teacher: Any, options: VisionOptions) -> None:
        super().__init__(options.smoothing)
        self.teacher, self.options = teacher, options

    def __call__(self, model: nn.Module, batch: ImageBatch, state: object, progress: float) -> ObjectiveOutput:
        if not model.training:
            return super().__call__(model, batch, state, progress)
        logits = model(batch.images).float()
        heads = logits if logits.dim() == 3 else logits[:, None]
        with torch.no_grad():
            teacher_logits = self.teacher.to(batch.images.device)(batch.images).float()
        weight = self.options.distillation_weight
        loss = (1 - weight) * self.loss(heads[:, 0], batch, self.smoothing)
        return loss + weight * self._distilled(heads[:, -1], teacher_logits), counted(logits.detach(), batch), None

    def _distilled(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        if self.options.distillation == "hard":
            return functional.cross_entropy(logits, teacher_logits.argmax(-1))
        warmth = self.options.distillation_temperature
        student, teacher = ((item / warmth).log_softmax(-1) for item in (logits, teacher_logits))
        return warmth**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def counted(logits: Tensor, batch: ImageBatch) -> dict[str, Tensor]:
    """Metrics of logits [rows, classes], or [rows, heads, classes], whose mean counts: of mixed images, by the label
    that has the larger share."""
    logits = logits.mean(1) if logits.dim() == 3 else logits
    labels = batch.labels
    if batch.others is not None and batch.shares is not None:
        labels = torch.where(batch.shares >= 0.5, labels, batch.others)
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return {"nats": nats, "predicted": (labels != IGNORED).sum(), "correct": (logits.argmax(-1) == labels).sum()}


def _of(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
