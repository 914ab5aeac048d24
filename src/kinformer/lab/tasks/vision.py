"""The task of image classification: how a model fits, its rows, its measures, and the classes of pictures.

A training row is an image, perhaps changed at random, and its class; some changes mix two images:

    images    cat.png      0.7 cat.png + 0.3 dog.png
    labels    0 (cat)      0 (cat)                        IGNORED in rows that do not count
    others    None         1 (dog)                        the label of the second image
    shares    None         0.7                            the loss is 0.7 L(cat) + 0.3 L(dog)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import WholeModel, device_of
from kinformer.core.pattern import check_grid
from kinformer.core.stack import ModelConfig
from kinformer.inputs.images import Patches
from kinformer.lab.data import IGNORED, ImageData, Images, read_images
from kinformer.lab.data.sampling import in_epochs, mix
from kinformer.lab.tables import PredictionTable
from kinformer.lab.tasks.answers import (
    ClassProbability,
    LabelMeasurement,
    classes_of,
    most_probable,
    numbers_of,
    spell_classes,
)
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    FileSource,
    LoadedRun,
    Made,
    Predicted,
    PredictionSettings,
    TrainedRun,
    Write,
    batched,
    input_of,
    part_of,
    parts_of,
)
from kinformer.lab.tasks.images import (
    Augmented,
    CachedFeatures,
    Picture,
    augment,
    keep_features,
    laid,
    open_images,
    picture_batches,
    pictures,
    pictures_in,
    require_channels,
)
from kinformer.lab.tasks.options import VisionOptions
from kinformer.lab.tasks.task import GenerationSettings, NoOptions, Source, TrainingPlan
from kinformer.lab.tasks.texts import HeldOut, spec_of
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, take_rows
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL, CALIBRATION_ERROR
from kinformer.runtime.errors import KinformerError, plural, require_finite

# How an encoder is fitted to images: the patches of its input, and the classes of its head.

INPUT, TILES = "patches", "tiles"
GRID = 8
"""Rows of patches of an encoder that was made for text."""
LEAST_PATCH = 2
"""The least pixels of a patch's side, where four patches of this size fit."""
LOOKED_AT = 4096
"""Images whose mean and standard deviation stand for the moments of all images."""


def open_classes(source: Source, options: VisionOptions, cache: Path | None = None) -> ImageData:
    """Return the images that ``source`` names, which have two classes or more."""
    images = open_images(source, options, cache)
    if len(images.classes) < 2:
        classes = plural(1, "class") if images.classes else "no classes"
        raise KinformerError(
            f"{source.spec}: has {classes} to tell apart; give images with labels of "
            "two or more, such as a folder with a folder per class."
        )
    return images


def fitted(config: ModelConfig, data: ImageData | None, classes: int | None = None) -> dict[str, object]:
    """Return overrides: the input's size, channels, normalisation and patches, about as many as the recipe has; the
    ``classes`` (None: the data's classes, two where the data is not known yet).
    An input with a mean was fitted in an earlier run and stays unchanged. An encoder of text gets patches in place of
    its tokens and positions."""
    if classes is None:
        classes = 2 if data is None else len(data.classes)
    head = {"kind": "linear_classification", "classes": classes}
    changes: dict[str, object] = {"head.classes": classes} if hasattr(config.head, "classes") else {"head": head}
    text = config.input.kind not in (INPUT, TILES)
    if text:
        changes |= {"position": "none", "input": INPUT}
    input: Patches.Config = input_of(config)
    if data is None or (not text and input.mean):
        return changes
    if config.input.kind == TILES:
        return changes | _pyramid(config, data)
    side = min(data.shape[:2])
    usual = side / GRID if text else input.patch * side / min(input.size)
    patch = max(LEAST_PATCH if side >= LEAST_PATCH * 4 else 1, round(usual))
    return changes | {"input": _patches(data, patch, None if text else input)}


def _patches(data: ImageData, patch: int, input: object = None) -> dict[str, object]:
    """Return an input of patches for images of ``data``, with the settings of ``input`` that they do not decide."""
    names = ("class_token", "distillation_token", "positions", "resize", "activation") if input is not None else ()
    mean, std = moments(data)
    sizes = {"size": list(data.shape[:2]), "channels": data.shape[2], "patch": patch, "mean": mean, "std": std}
    return {"kind": INPUT, **{name: getattr(input, name) for name in names}, **sizes}


def _pyramid(config: ModelConfig, data: ImageData) -> dict[str, object]:
    """Return the overrides of an input of tiles. Patches have the recipe's size, reduced in proportion for smaller
    images, but two pixels or more where four tiles of such patches fit on a side. A tile has as many patches on a side,
    and a region as many tiles, as the recipe has."""
    levels: list[Patches.Config] = [input_of(config)]
    while config.input.kind == TILES:
        config = part_of(config.input, "encoder")
        levels.insert(0, input_of(config))
    lowest, side = levels[0], min(data.shape[:2])
    ratio = lowest.size[0] // lowest.patch
    least = LEAST_PATCH if side >= 4 * LEAST_PATCH * ratio else 1
    patch = max(least, round(lowest.patch * min(1, side / min(levels[-1].size))))
    sides = [patch]
    for level in levels[:-1]:
        limit = -(-side // sides[-1])
        sides.append(sides[-1] * min(level.size[0] // level.patch, limit))
    names = ["input" + ".encoder.input" * depth for depth in reversed(range(len(levels)))]
    sizes = [[item, item] for item in sides[1:]] + [list(data.shape[:2])]
    changes: dict[str, object] = {names[0]: _patches(data, patch, lowest) | {"size": sizes[0]}}
    return changes | {f"{name}.size": size for name, size in zip(names[1:], sizes[1:], strict=True)}


@lru_cache(maxsize=2)
def moments(data: ImageData) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of the channels of training images, from 0 to 1; 1 for a constant one."""
    pixels = np.asarray(data.train.pixels[:LOOKED_AT], np.float64) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    return [round(float(item), 6) for item in mean], [round(float(item), 6) if item > 1e-3 else 1.0 for item in std]


def length_of(data: ImageData, config: ModelConfig) -> int:
    """Return how many positions an image of ``data`` becomes; its size may differ from the size for which positions
    were learned."""
    if config.input.kind not in (INPUT, TILES):
        raise KinformerError(
            f"`set` input={config.input.kind}: images need the input patches or tiles; leave it out, or choose "
            "another task."
        )
    input: Patches.Config = input_of(config)
    return input.replace(size=data.shape[:2]).length


def check_images(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model that does not match the images, or that predicts something else."""
    check_images_read(plan, model)
    config, data = plan.config, plan.data
    classes = getattr(config.head, "classes", None)
    if config.head.per_position or classes != len(data.classes):
        raise KinformerError(
            f"`set` head={config.head.kind}: does not tell the {plural(len(data.classes), 'class')} of {data.name}; "
            "leave it out."
        )


def check_images_read(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model of images of other channels, or whose patterns are for another grid of patches."""
    check_channels(plan)
    if plan.config.input.kind == INPUT:
        recipe: Patches.Config = input_of(plan.config)
        input = recipe.replace(size=plan.data.shape[:2])
        for module in model.modules():
            check_grid(getattr(module, "pattern", None), input.grid, input.length)


def check_channels(plan: TrainingPlan) -> None:
    """Refuse a model of images of other channels."""
    require_channels(plan.data, plan.config, "the model", "other images, or another model to begin with")


# Batches of images with their classes, in an order computed without memory, changed at each step by the run's seed. The
# objective of the classes of images, which may be mixed.

LEAST_IMAGES = 256
_ORDER, _CHANGES, _SHARE = 11, 12, 13


class ImageBatch(NamedTuple):
    """``images`` [rows, channels, height, width], uint8 or floats from 0 to 1, and ``labels`` int64 [rows]; IGNORED
    labels do not count. Where two images were mixed, ``others`` int64 [rows] are the labels of the second, and
    ``shares`` [rows] is the part of the first. ``positions`` [rows, n] bool has one for each that an image becomes.
    """

    images: Tensor
    labels: Tensor
    positions: Tensor
    others: Tensor | None = None
    shares: Tensor | None = None

    @property
    def size(self) -> int:
        return self.positions.numel()


class HeldOutRows(DataModule):
    """Rows whose validation has the first ``held_out`` items of a split: by default images, as many as make up the
    tokens that the settings say, 256 at least."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.data, self.settings, self.options = plan.data, plan.settings, plan.options
        enough = ceil(self.settings.validation_tokens / self.settings.length)
        self.held_out = min(len(self.data.validation), max(LEAST_IMAGES, enough))

    @property
    def validations(self) -> int:
        return -(-self.held_out // self.settings.batch_size)

    def shares(self, rank: int, world: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the numbers of the process's items of each batch, and which count: repeated ones do not."""
        rows = self.settings.batch_size
        for first in range(0, self.held_out, rows):
            count = min(rows, self.held_out - first)
            share = -(-count // world)
            place = np.arange(rank * share, (rank + 1) * share)
            yield first + np.minimum(place, count - 1), place < count


class ImageRows(HeldOutRows):
    """Training images in a new order in every epoch, and the first validation images.
    ``features`` keeps the features of frozen encoders, where there are some; the objective sets it."""

    sums = ("nats", "correct")
    metrics = (ACCURACY, BITS_PER_LABEL)
    features: CachedFeatures | None = None

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__(plan)
        self.chosen = chosen(self.data.train, self.options.label_share, self.settings.seed)

    def batch(self, step: int, rank: int, world: int) -> ImageBatch:
        """Make the whole step's rows in every process, so that images are mixed alike whatever their number."""
        rows, seed = self.settings.batch_size, self.settings.seed
        place = np.arange(step * rows, (step + 1) * rows) // self.options.repeats
        index = self.chosen[in_epochs(place, len(self.chosen), seed, _ORDER)]
        augmented = Augmented(*self._read(self.data.train, index))
        if names := self.options.augmentations:
            generator = torch.Generator().manual_seed(int(mix(seed, _CHANGES, step)[0] >> np.uint64(1)))
            augmented = augment(augmented._replace(images=augmented.images.float() / 255), names, generator)
        share = rows // world
        return take_rows(self._batch(*augmented), slice(rank * share, (rank + 1) * share))

    def validation(self, rank: int, world: int) -> Iterator[ImageBatch]:
        for index, counts in self.shares(rank, world):
            images, labels = self._read(self.data.validation, index)
            yield self._batch(images, labels.masked_fill(torch.from_numpy(~counts), IGNORED))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}

    def baselines(self) -> dict[str, float]:
        assert self.data.validation.labels is not None
        return {"guessing": float(np.bincount(self.data.validation.labels[: self.held_out]).max() / self.held_out)}

    def _read(self, split: Images, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the pixels or features of each image, and the labels."""
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
    """Return the numbers of the images to learn from: ``share`` of each class, one at least, drawn by ``seed``."""
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
            return first.sum() / (batch.labels != IGNORED).sum().clamp_min(1)
        return (batch.shares * first + (1 - batch.shares) * _cross_entropy(logits, batch.others, smoothing)).mean()


class Distillation(ImageClassification):
    """(1 - weight) * cross-entropy of the label + weight * the loss against the teacher (DeiT, section 4).
    ``hard``: the cross-entropy of the class that the teacher finds most probable; ``soft``: temperature^2 * KL(teacher
    || student) of both at that temperature. A model with two heads learns the label by the first and this by the
    second. Where nothing is learnt, as in validation, it is the plain cross-entropy."""

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
        if self.options.distillation == "hard":
            distilled = functional.cross_entropy(heads[:, -1], teacher_logits.argmax(-1))
        else:
            warmth = self.options.distillation_temperature
            student, teacher = ((item / warmth).log_softmax(-1) for item in (heads[:, -1], teacher_logits))
            distilled = warmth**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
        loss = self.loss(heads[:, 0], batch, self.smoothing)
        weight = self.options.distillation_weight
        return (1 - weight) * loss + weight * distilled, counted(logits.detach(), batch), None


def class_loss(model: WholeModel, data: DataModule | None) -> ImageClassification:
    """Return the objective of classes, with the teacher of the rows ``data`` where they have one."""
    if not isinstance(data, ImageRows):
        return ImageClassification()
    teacher, options = data.teacher, data.options
    data.features = keep_features(part_of(model, "input"), changed=bool(options.augmentations or teacher))
    return ImageClassification(options.smoothing) if teacher is None else Distillation(teacher, options)


def counted(logits: Tensor, batch: ImageBatch) -> dict[str, Tensor]:
    """Return metrics of logits [rows, classes], or [rows, heads, classes], whose mean counts; a mixed image counts by
    the label with the larger share."""
    logits = logits.mean(1) if logits.dim() == 3 else logits
    labels = batch.labels
    if batch.others is not None and batch.shares is not None:
        labels = torch.where(batch.shares >= 0.5, labels, batch.others)
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return {"nats": nats, "predicted": (labels != IGNORED).sum(), "correct": (logits.argmax(-1) == labels).sum()}


def _cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)


# How well a model predicts the classes of images: class by class, and whether its probabilities can be believed.

BINS = 15
AT_ONCE = 64
TOP = 5


def measure_images(
    model: WholeModel, images: Images, count: int, classes: int, quiet: bool
) -> tuple[LabelMeasurement, float]:
    """Measure ``model`` (in eval mode) on the first ``count`` of ``images``; return how often the right class is among
    the five most probable, too."""
    assert images.labels is not None
    measured, among = LabelMeasurement(images.labels[:count], classes), 0
    with torch.inference_mode():
        for part in parts_of(count, AT_ONCE, quiet):
            index = np.arange(part.start, part.stop)
            pixels, labels = tensors(images, index)
            logits = model(pixels.to(device_of(model))).float().cpu()
            measured.note(index, logits)
            among += int((logits.topk(min(TOP, classes)).indices == labels[:, None]).sum())
    return measured, among / count


def calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of probabilities ``sure`` [n]; ``right`` [n]: which predictions were."""
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, sure, BINS) - np.bincount(place, right, BINS)
    return float(np.abs(gaps).sum() / len(sure))


def evaluate(subject: LoadedRun, settings: EvaluationSettings, options: PredictionTable, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out images, class by class, beside the most frequent class."""
    held, count = held_out_images(subject.run, settings, labelled=True)
    classes, number = classes_of(subject.run), numbers_of(subject.run, held.data.name, held.data.classes)
    labels, started_at = number[np.asarray(held.split.labels)], time.perf_counter()
    images = replace(held.split, labels=labels)
    measured, top_5 = measure_images(subject.model, images, count, len(classes), quiet)
    options.write_predictions(measured.rows(classes))
    counts, table = measured.by_class(classes, "images")
    error = calibration_error(measured.shares, measured.right)
    text = (
        f"accuracy {measured.accuracy:.1%}, top-5 {top_5:.1%}, {measured.bits:.4f} bits per label, "
        f"calibration error {error:.1%}: {plural(count, 'image')}, {measured.guessing:.1%} are of "
        "the most frequent class\n",
        table,
    )
    metrics = {ACCURACY: measured.accuracy, BITS_PER_LABEL: measured.bits, CALIBRATION_ERROR: error}
    baselines = {"guessing": measured.guessing}
    facts = baselines | {"measured_images": count, "top_5_accuracy": top_5, "per_class": counts}
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="vision", since=started_at)


def held_out_images(run: TrainedRun, settings: EvaluationSettings, labelled: bool = False) -> tuple[HeldOut, int]:
    """Return the images that ``settings`` name, or the images of ``run``, and how many to measure on; ``labelled``:
    they must have labels."""
    data = read_images(spec_of(run, settings.data), holdout=run.data.get("holdout"), size=run.options.resize)
    if labelled and not data.classes:
        raise KinformerError(f"{data.name}: its images do not have labels to measure by; give others.")
    require_channels(data, run.config, str(run.folder))
    held = HeldOut.of(run, settings, data)
    return held, len(held.split.pixels[: settings.first])


# The most probable classes of pictures: of a file, of the files in a folder, or of test images.


def predicted_classes(
    model: WholeModel, batch: Sequence[Picture], names: Sequence[str], top_k: int
) -> Iterator[tuple[Picture, list[ClassProbability], str]]:
    """Yield every picture of ``batch`` with its ``top_k`` most probable classes and a line for people."""
    for picture, probabilities in zip(batch, probabilities_of(model, batch), strict=True):
        classes = most_probable(probabilities, names, top_k)
        label = "" if picture.label is None else f" ({picture.label})"
        yield picture, classes, f"{picture.name}{label}: {spell_classes(classes)}"


def classify(subject: LoadedRun, prompt: None, options: GenerationSettings, write: Write) -> Made:
    """Return the most probable classes of each image; ``write`` receives a line for each."""
    run, task_options = subject.run, options.task_options
    if task_options.image is None:
        raise KinformerError("there must be an image to classify; give `image` FILE, a folder, or data such as digits.")
    predictions: list[dict[str, object]] = []
    started_at, names = time.perf_counter(), classes_of(run)
    for batch in batched(pictures(run, task_options.image, options.samples), AT_ONCE):
        for picture, classes, line in predicted_classes(subject.model, batch, names, task_options.classes):
            if write is not None:
                write(("\n" if predictions else "") + line)
            predictions.append({"image": picture.name, "label": picture.label, "classes": classes})
    seconds = time.perf_counter() - started_at
    facts, speed = {"run": str(run.folder), "images": predictions, "seconds": seconds}, len(predictions) / seconds
    return Made(facts, f"{plural(len(predictions), 'image')} in {seconds:.3f} s, {speed:.3g} images/s")


def predict(
    subject: LoadedRun, source: FileSource, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield the most probable classes of the images of ``source``, in order: a picture, all in a folder and its
    folders, the test images of data, or a list of pictures' paths."""
    names = classes_of(subject.run)
    taken = pictures_in(subject.run, source, settings.first, names, settings.skip_bad)
    for batch in picture_batches(taken, settings, "predicting"):
        for picture, classes, line in predicted_classes(subject.model, batch, names, settings.top_k):
            label = {} if picture.label is None else {"label": picture.label}
            yield Predicted({"image": picture.name, **label, "classes": classes}, line)


def probabilities_of(model: WholeModel, batch: Sequence[Picture]) -> Tensor:
    """Return the probabilities [images, classes] of pictures of one size."""
    with torch.inference_mode():
        logits = model(laid(batch, model)).float().cpu()
    require_finite(bool(logits.isfinite().all()))
    return logits.softmax(-1)
