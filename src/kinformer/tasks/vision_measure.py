"""How well a model predicts the classes of images: class by class, and whether its probabilities can be believed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kinformer.core.errors import KinformerError, choose
from kinformer.core.figure import ACCURACY, BITS_PER_LABEL, CALIBRATION_ERROR
from kinformer.core.model import device_of
from kinformer.core.progress import Progress, progressing
from kinformer.data import ImageData, Images, read_images
from kinformer.tasks.label_measure import LabelMeasurement
from kinformer.tasks.task import Evaluation, LoadedRun, Measuring, Table
from kinformer.tasks.text import heading, note_other_data, spec_of
from kinformer.tasks.vision_options import VisionMeasuring
from kinformer.tasks.vision_rows import tensors

BINS = 15
AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class ImageMeasurement(LabelMeasurement):
    """``calibration_error``: the mean gap between the probability of the predicted class and how often it is right,
    over 15 bins of that probability (Guo et al. 2017, section 2)."""

    calibration_error: float


def measure_images(
    model: Any, images: Images, count: int, classes: int, progress: Progress | None = None
) -> ImageMeasurement:
    """Measure ``model`` (in eval mode) on the first ``count`` of ``images``."""
    device = device_of(model)
    found: list[tuple[np.ndarray, ...]] = []
    nats = 0.0
    with torch.inference_mode():
        for first in range(0, count, AT_ONCE):
            pixels, labels = tensors(images, np.arange(first, min(first + AT_ONCE, count)))
            logits = model(pixels.to(device)).float().cpu()
            nats += float(functional.cross_entropy(logits, labels, reduction="sum"))
            if not isfinite(nats):
                raise KinformerError("the model's predictions are not finite numbers; its weights are damaged.")
            sure, guesses = logits.softmax(-1).max(-1)
            found.append((labels.numpy(), guesses.numpy(), sure.double().numpy()))
            if progress is not None:
                progress(first + len(labels), count)
    labels_, guesses_, sure_ = (np.concatenate(each) for each in zip(*found, strict=True))
    counts = (np.bincount(each, minlength=classes) for each in (labels_, guesses_, labels_[guesses_ == labels_]))
    examples, predicted, correct = (tuple(each.tolist()) for each in counts)
    return ImageMeasurement(
        bits=nats / log(2) / count,
        examples=examples,
        predicted=predicted,
        correct=correct,
        calibration_error=calibration_error(sure_, guesses_ == labels_),
    )


def calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    """Of probabilities [n] from 0 to 1 and whether each prediction was right."""
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, sure, BINS) - np.bincount(place, right, BINS)
    return float(np.abs(gaps).sum() / len(sure))


def evaluate(subject: LoadedRun, measuring: Measuring, own: VisionMeasuring, quiet: bool) -> Evaluation:
    """A run on held-out images, class by class, beside the most frequent class."""
    run, model, changes, _ = subject
    found, images, classes = _images(subject, measuring)
    count = len(images) if own.images is None else min(own.images, len(images))
    begun = time.perf_counter()
    with progressing(quiet) as progress:
        measured = measure_images(model, images, count, len(classes), progress)
    counts = [
        {"class": name, "images": there, "predicted": predicted, "correct": correct}
        for name, there, predicted, correct in zip(
            classes, measured.examples, measured.predicted, measured.correct, strict=True
        )
    ]
    text = (
        heading(run.folder, run.member, changes, found, measuring.split),
        f"accuracy {measured.accuracy:.1%}, {measured.bits:.4f} bits per label, calibration error "
        f"{measured.calibration_error:.1%}: {count:,} images, {measured.guessing:.1%} are of the most frequent class\n",
        Table(("class", "images", "predicted", "correct"), [list(each.values()) for each in counts], range(1, 4)),
    )
    figures = {
        ACCURACY.name: measured.accuracy,
        BITS_PER_LABEL.name: measured.bits,
        CALIBRATION_ERROR.name: measured.calibration_error,
    }
    same = found.fingerprint == (run.data.get("identity") or {}).get("fingerprint")
    identity = found.identity | {"split": measuring.split, "same_as_run": same}
    facts = {
        "run": str(run.folder), "member": run.member, "task": "vision", "set": list(changes), "data": identity,
        **figures, "guessing": measured.guessing,
        "measured_images": count, "per_class": counts, "seconds": time.perf_counter() - begun,
    }  # fmt: skip
    return Evaluation(
        run=str(run.folder),
        member=run.member,
        figures=figures,
        units=(ACCURACY, BITS_PER_LABEL, CALIBRATION_ERROR),
        baselines={"guessing": measured.guessing},
        data=identity,
        facts=facts,
        text=text,
    )


def classes_of(run: Any) -> list[str]:
    """The names of the classes that a run predicts."""
    known = (run.data.get("identity") or {}).get("classes")
    if not isinstance(known, list):
        raise KinformerError(f"{run.folder}: does not say which classes it predicts; measure the run that was trained.")
    return known


def _images(subject: LoadedRun, measuring: Measuring) -> tuple[ImageData, Images, Sequence[str]]:
    """The data, the part to measure on with the numbers that the run gave to its classes, and the names of those."""
    run, model = subject.run, subject.model
    found = read_images(spec_of(run, measuring.data), holdout=run.data.get("holdout"), size=run.options.resize)
    note_other_data(run, found, measuring.data is not None)
    known = classes_of(run)
    if not found.classes:
        raise KinformerError(f"{found.name}: its images have no labels to measure by; give others.")
    if strange := [name for name in found.classes if name not in known]:
        raise KinformerError(
            f"{found.name}: has the class {strange[0]!r}, which {run.folder} was not trained to predict; it predicts "
            f"{', '.join(known)}."
        )
    part = found.splits[choose(measuring.split, found.splits, "--split")]
    if part.shape[2] != model.config.input.channels:
        raise KinformerError(
            f"{found.name}: its images have {part.shape[2]} channels, but {run.folder} reads "
            f"{model.config.input.channels}; give others."
        )
    assert part.labels is not None
    number = np.array([known.index(name) for name in found.classes], np.int64)
    return found, replace(part, labels=number[np.asarray(part.labels)]), known
