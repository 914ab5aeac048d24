"""How good an encoder's vectors are: whether the nearest training images are of the same class (Caron et al. 2021,
section 4.1; Wu et al. 2018, section 3.4)."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.model import StackedWholeModel, device_of
from kinformer.data import Images
from kinformer.runtime.errors import require_finite
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.dino.loss import level_of
from kinformer.tasks.dino.options import DinoEvaluationOptions
from kinformer.tasks.dino.rows import Pieces, level_config
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.text import heading, identity_of_part
from kinformer.tasks.shared.views import PatchInput, input_of, part_of
from kinformer.tasks.vision.evaluate import labelled_part
from kinformer.training.metric import ACCURACY

TEMPERATURE = 0.07
AT_ONCE = 16


def vectors_of(
    model: StackedWholeModel, level: int, images: Images, count: int, progress: ProgressCallback | None = None
) -> Tensor:
    """Return vectors [count, dim] of length 1: of each of the first images the mean of the encoder's vectors of its
    pieces."""
    input: PatchInput = input_of(level_config(model.config, level))
    size = input.size
    encoder, pieces, device = level_of(model, level), Pieces(images, (size[0], size[1])), device_of(model)
    per_image, parts = len(pieces) // len(images), []
    with torch.inference_mode():
        for first in range(0, count, AT_ONCE):
            last = min(first + AT_ONCE, count)
            values = pieces.take(np.arange(first * per_image, last * per_image)).to(device)
            vectors = (
                part_of(encoder.head, "pooled")(encoder.hidden(values).long_input).float().unflatten(0, (-1, per_image))
            )
            require_finite(bool(vectors.isfinite().all()))
            parts.append(functional.normalize(vectors.mean(1), dim=-1).cpu())
            if progress is not None:
                progress(last, count)
    return torch.cat(parts)


def nearest_classes(vectors: Tensor, reference: Tensor, labels: Tensor, nearest: int, classes: int) -> Tensor:
    """Return the class [n] of ``vectors`` [n, dim] by weighted votes of their ``nearest`` neighbours.

    The neighbours are rows of ``reference`` [m, dim] with ``labels`` [m]; each votes with exp(cosine / 0.07).
    """
    cosine, index = (vectors @ reference.T).topk(min(nearest, len(reference)), dim=-1)
    votes = functional.one_hot(labels[index], classes) * (cosine / TEMPERATURE).exp()[..., None]
    return votes.sum(1).argmax(-1)


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: DinoEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out images, beside the most frequent class."""
    run, model = subject.run, subject.model
    result, same, part = labelled_part(subject, evaluation_settings)
    count = len(part) if task_options.max_items is None else min(task_options.max_items, len(part))
    level, started_at = run.options.level, time.perf_counter()
    with progressing(quiet) as progress:
        train_vectors = vectors_of(model, level, result.train, len(result.train), progress)
        vectors = vectors_of(model, level, part, count)
    labels, test_labels = (torch.from_numpy(np.array(item.labels)) for item in (result.train, part))
    test_labels = test_labels[:count]
    guesses = nearest_classes(vectors, train_vectors, labels, task_options.nearest, len(result.classes))
    accuracy = float((guesses == test_labels).double().mean())
    guessing = float(test_labels.bincount().max()) / count
    text = (
        heading(subject, result, evaluation_settings.split),
        f"accuracy {accuracy:.1%} by the {task_options.nearest} nearest training images, by vectors of level {level}: "
        f"{plural(count, 'image')}, {guessing:.1%} are of the most frequent class",
    )
    metrics, baselines = {ACCURACY: accuracy}, {"guessing": guessing}
    facts = baselines | {"nearest": task_options.nearest, "level": level, "measured_images": count}
    identity = identity_of_part(result, evaluation_settings.split, same)
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task="dino", since=started_at)
