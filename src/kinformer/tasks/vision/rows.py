"""Batches of images with their classes: in an order that needs no memory, changed at each step from the run's seed.
The objective of the classes of images, which may be mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import WholeModel
from kinformer.data import IGNORED, ImageData, Images
from kinformer.data.permutation import in_epochs, mix
from kinformer.tasks.shared.augmentation import Augmented, augment
from kinformer.tasks.shared.image_features import CachedFeatures
from kinformer.tasks.vision.options import VisionOptions
from kinformer.training.batch import take_rows
from kinformer.training.data_module import DataModule
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings

LEAST_IMAGES = 256
_ORDER, _CHANGES, _SHARE = 11, 12, 13


class ImageBatch(NamedTuple):
    """``images`` [rows, channels, height, width], uint8 or floats from 0 to 1, and ``labels`` int64 [rows], of which
    IGNORED ones do not count. Where two images were mixed, ``others`` int64 [rows] are the labels of the second, and
    ``shares`` [rows] is the part of the first. ``positions`` [rows, n] bool has one for each that an image becomes.
    """

    images: Tensor
    labels: Tensor
    positions: Tensor
    others: Tensor | None = None
    shares: Tensor | None = None

    @property
    def size(self) -> int:
        """Return how many positions are read."""
        return self.positions.numel()


class ImageRows(DataModule):
    """Training images in an order of their own in every epoch; the first of the validation images.

    ``features`` keeps what frozen encoders make of them, where there are some; the objective sets it.
    """

    sums = ("nats", "correct")
    metrics = (ACCURACY, BITS_PER_LABEL)
    features: CachedFeatures | None = None

    def __init__(self, data: ImageData, settings: Settings, options: VisionOptions) -> None:
        self.data, self.settings, self.options = data, settings, options
        self.chosen = chosen(data.train, options.label_share, settings.seed)
        enough = ceil(settings.validation_tokens / settings.length)
        self.held_out = min(len(data.validation), max(LEAST_IMAGES, enough))

    @property
    def validations(self) -> int:
        return -(-self.held_out // self.settings.batch_size)

    def batch(self, step: int, rank: int, world: int) -> ImageBatch:
        """Make the whole step's rows in every process, so that images are mixed alike whatever their number."""
        rows = self.settings.batch_size
        place = np.arange(step * rows, (step + 1) * rows) // self.options.repeats
        index = self.chosen[in_epochs(place, len(self.chosen), self.settings.seed, _ORDER)]
        generator = torch.Generator().manual_seed(int(mix(self.settings.seed, _CHANGES, step)[0] >> np.uint64(1)))
        images, labels = self._read(self.data.train, index)
        augmented = Augmented(images, labels)
        if names := self.options.augmentations:
            augmented = augment(Augmented(images.float() / 255, labels), names, generator)
        share = rows // world
        return take_rows(self._batch(*augmented), slice(rank * share, (rank + 1) * share))

    def validation(self, rank: int, world: int) -> Iterator[ImageBatch]:
        rows = self.settings.batch_size
        for first in range(0, self.held_out, rows):
            count = min(rows, self.held_out - first)
            share = -(-count // world)
            indices = np.arange(rank * share, (rank + 1) * share)
            images, labels = self._read(self.data.validation, first + np.minimum(indices, count - 1))
            yield self._batch(images, labels.masked_fill(torch.from_numpy(indices >= count), IGNORED))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}

    def _read(self, split: Images, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return what the model reads of each image, and the labels."""
        images, labels = tensors(split, index)
        return images if self.features is None else self.features.of(images, split.name, index), labels

    def _batch(
        self, images: Tensor, labels: Tensor, others: Tensor | None = None, shares: Tensor | None = None
    ) -> ImageBatch:
        positions = torch.ones(len(images), self.settings.length, dtype=torch.bool)
        return ImageBatch(images, labels, positions, others, shares)


def tensors(images: Images, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return images [rows, channels, height, width] uint8 and their labels [rows]."""
    assert images.labels is not None
    return pixels_of(images, index), torch.from_numpy(np.array(images.labels[index]))


def pixels_of(images: Images, index: np.ndarray) -> Tensor:
    """Return images [rows, channels, height, width] uint8."""
    return torch.from_numpy(np.array(images.pixels[index].transpose(0, 3, 1, 2), order="C"))


def chosen(images: Images, share: float, seed: int) -> np.ndarray:
    """Return the numbers of the images that are learnt from: ``share`` of each class, one at least, drawn by
    ``seed``."""
    assert images.labels is not None
    labels = np.asarray(images.labels)
    if share == 1:
        return np.arange(len(labels))
    order = np.argsort(mix(seed, _SHARE, np.arange(len(labels))), kind="stable")
    classes = [order[labels[order] == label] for label in np.unique(labels)]
    return np.sort(np.concatenate([indices[: max(1, round(share * len(indices)))] for indices in classes]))


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
        first = _cross_entropy(logits, batch.labels, smoothing)
        if batch.others is None or batch.shares is None:
            labelled = (batch.labels != IGNORED).sum()
            return first.sum() / labelled.clamp_min(1)
        return (batch.shares * first + (1 - batch.shares) * _cross_entropy(logits, batch.others, smoothing)).mean()


class Distillation(ImageClassification):
    """(1 - weight) * cross-entropy of the label + weight * the loss against the teacher (DeiT, section 4).

    ``hard``: the cross-entropy of the class that the teacher finds most probable; ``soft``: temperature^2 * KL(teacher
    || student) of both at that temperature. A model with two heads learns the label by the first and this by the
    second. Where nothing is learnt, as in validation, it is the plain cross-entropy.
    """

    def __init__(self, teacher: WholeModel, options: VisionOptions) -> None:
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
    """Return metrics of logits [rows, classes], or [rows, heads, classes], whose mean counts: of mixed images, by the
    label that has the larger share."""
    logits = logits.mean(1) if logits.dim() == 3 else logits
    labels = batch.labels
    if batch.others is not None and batch.shares is not None:
        labels = torch.where(batch.shares >= 0.5, labels, batch.others)
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return {"nats": nats, "predicted": (labels != IGNORED).sum(), "correct": (logits.argmax(-1) == labels).sum()}


def _cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
