"""How well a model predicts the classes of images: class by class, and whether its probabilities can be believed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import isfinite, log

import numpy as np
import torch
from torch.nn import functional

from kinformer.core.model import WholeModel, device_of
from kinformer.data import ImageData, Images, read_images
from kinformer.runtime.errors import KinformerError, choose, require_finite
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.classify.evaluate import LabelMeasurement
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.classes import ClassPredictions, by_class, classes_of, numbers_of
from kinformer.tasks.shared.text import heading, identity_of_part, note_other_data, spec_of
from kinformer.tasks.vision.options import VisionEvaluationOptions
from kinformer.tasks.vision.rows import tensors
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL, CALIBRATION_ERROR

BINS = 15
AT_ONCE = 64
TOP = 5


@dataclass(frozen=True, kw_only=True)
class ImageMeasurement(LabelMeasurement):
    """``calibration_error``: the mean gap between the probability of the predicted class and how often it is right,
    over 15 bins of that probability (Guo et al. 2017, section 2). ``top_5``: how often the right class is among the
    five most probable."""

    calibration_error: float
    top_5: float


def measure_images(
    model: WholeModel,
    images: Images,
    count: int,
    classes: int,
    progress: ProgressCallback | None = None,
    predictions: ClassPredictions | None = None,
) -> ImageMeasurement:
    """Measure ``model`` (in eval mode) on the first ``count`` of ``images``; ``predictions`` notes what it predicts of
    each."""
    device = device_of(model)
    batches: list[tuple[np.ndarray, ...]] = []
    nats, among = 0.0, 0
    with torch.inference_mode():
        for first in range(0, count, AT_ONCE):
            pixels, labels = tensors(images, np.arange(first, min(first + AT_ONCE, count)))
            logits = model(pixels.to(device)).float().cpu()
            nats += float(functional.cross_entropy(logits, labels, reduction="sum"))
            require_finite(isfinite(nats))
            nearest = logits.topk(min(TOP, logits.shape[-1])).indices
            among += int((nearest == labels[:, None]).sum())
            sure, guesses = logits.softmax(-1).max(-1)
            if predictions is not None:
                predictions.note(np.arange(first, first + len(labels)), logits)
            batches.append((labels.numpy(), guesses.numpy(), sure.double().numpy()))
            if progress is not None:
                progress(first + len(labels), count)
    labels_, guesses_, sure_ = (np.concatenate(item) for item in zip(*batches, strict=True))
    counts = (np.bincount(item, minlength=classes) for item in (labels_, guesses_, labels_[guesses_ == labels_]))
    examples, predicted, correct = (tuple(item.tolist()) for item in counts)
    return ImageMeasurement(
        bits=nats / log(2) / count,
        examples=examples,
        predicted=predicted,
        correct=correct,
        calibration_error=calibration_error(sure_, guesses_ == labels_),
        top_5=among / count,
    )


def calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of probabilities ``sure`` [n] from 0 to 1; ``right`` [n] says which
    predictions were."""
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, sure, BINS) - np.bincount(place, right, BINS)
    return float(np.abs(gaps).sum() / len(sure))


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: VisionEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out images, class by class, beside the most frequent class."""
    result, same, images = _images(subject, evaluation_settings)
    classes = classes_of(subject.run)
    count = len(images) if task_options.max_items is None else min(task_options.max_items, len(images))
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        predictions = None if task_options.predictions is None else ClassPredictions(count)
        measured = measure_images(subject.model, images, count, len(classes), progress, predictions)
    if predictions is not None:
        assert images.labels is not None
        task_options.write_predictions(predictions.rows(images.labels, classes))
    counts, table = by_class(classes, measured, "images")
    text = (
        heading(subject, result, evaluation_settings.split),
        f"accuracy {measured.accuracy:.1%}, top-5 {measured.top_5:.1%}, {measured.bits:.4f} bits per label, "
        f"calibration error {measured.calibration_error:.1%}: {plural(count, 'image')}, {measured.guessing:.1%} are of "
        "the most frequent class\n",
        table,
    )
    metrics = {
        ACCURACY: measured.accuracy,
        BITS_PER_LABEL: measured.bits,
        CALIBRATION_ERROR: measured.calibration_error,
    }
    baselines, identity = {"guessing": measured.guessing}, identity_of_part(result, evaluation_settings.split, same)
    facts = baselines | {"measured_images": count, "top_5_accuracy": measured.top_5, "per_class": counts}
    return evaluated(
        subject, metrics, identity, text, facts=facts, baselines=baselines, task="vision", since=started_at
    )


def _images(subject: LoadedRun, evaluation_settings: EvaluationSettings) -> tuple[ImageData, bool, Images]:
    """Return the data, whether it is the run's own, and the part to measure on, with the run's numbers of classes."""
    images, same, part = labelled_part(subject, evaluation_settings)
    number = numbers_of(subject.run, images.name, images.classes)
    assert part.labels is not None
    return images, same, replace(part, labels=number[np.asarray(part.labels)])


def labelled_part(subject: LoadedRun, evaluation_settings: EvaluationSettings) -> tuple[ImageData, bool, Images]:
    """Return the data, whether it is the run's own, and the part to measure on, whose images have labels and the
    model's channels."""
    run, model = subject.run, subject.model
    images = read_images(
        spec_of(run, evaluation_settings.data), holdout=run.data.get("holdout"), size=run.options.resize
    )
    same = note_other_data(run, images, evaluation_settings.data is not None)
    if not images.classes:
        raise KinformerError(f"{images.name}: its images have no labels to measure by; give others.")
    part = images.splits[choose(evaluation_settings.split, images.splits, "`split`")]
    if part.shape[2] != model.config.input.channels:
        raise KinformerError(
            f"{images.name}: its images have {plural(part.shape[2], 'channel')}, but {run.folder} reads "
            f"{model.config.input.channels}; give others."
        )
    return images, same, part
