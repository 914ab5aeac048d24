"""Bits per dimension of a run, beside what counting finds in the same images."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isfinite, log
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import StackedCausalModel, device_of
from kinformer.data.image_floors import floors
from kinformer.data.images import ImageData, read_images
from kinformer.runtime.errors import KinformerError, choose, require_finite
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.image.rows import Sequences, labelled, nats_of, shifted
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.classes import numbers_of
from kinformer.tasks.shared.text import heading, identity_of_part, note_other_data, spec_of
from kinformer.tasks.shared.views import PixelInput, input_of
from kinformer.training.metric import BITS_PER_DIM, Metric

if TYPE_CHECKING:
    from kinformer.tasks.image import ImageEvaluationOptions

WITHOUT_FIRST = Metric("bits_per_dim_without_first", "bits per dimension without the first value of an image")


def data_of(run: TrainedRun, data: str | None) -> ImageData:
    """Return the images that ``data`` names, or the run's own; refuse ones of another shape than the model's."""
    spec = spec_of(run, data)
    images = read_images(spec, holdout=run.data.get("holdout"), size=run.options.resize)
    input: PixelInput = input_of(run.config)
    if images.shape != (shape := (input.height, input.width, input.channels)):
        raise KinformerError(
            f"`data` {spec}: has images of {' x '.join(map(str, images.shape))}, but this model draws "
            f"{' x '.join(map(str, shape))}; give images of that shape."
        )
    return images


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: ImageEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on the images of a split, every value scored unless the options say otherwise."""
    run, model = subject.run, subject.model
    started_at = time.perf_counter()
    data = data_of(run, evaluation_settings.data)
    split = data.splits[choose(evaluation_settings.split, data.splits, "`split`")]
    same = note_other_data(run, data, evaluation_settings.data is not None)
    pixels = split.pixels[: task_options.max_items]
    sequences, labels = Sequences(input_of(run.config)), labels_of(run, data, split.labels)

    def score(part: slice) -> tuple[Tensor, Tensor]:
        values = sequences.of(pixels[part]).to(device_of(model))
        return model(labelled(shifted(values), None if labels is None else labels[part]))[0], values

    rows = max(1, evaluation_settings.chunk // len(sequences.order))
    nats, first = nats_of_images(len(pixels), rows, score, model, quiet)
    require_finite(isfinite(nats))
    per_image = pixels[0].size
    unscored = sequences.input.channels if sequences.input.joint else 1
    every = nats / log(2) / pixels.size
    rest = (nats - first) / log(2) / (len(pixels) * (per_image - unscored))
    main = WITHOUT_FIRST if task_options.without_first else BITS_PER_DIM
    value = rest if task_options.without_first else every
    baselines, scored = floors(data.train.pixels, pixels), per_image - unscored * task_options.without_first
    facts = {
        "images": len(pixels), "dimensions": per_image, "scored": scored,
        "histogram_bits": baselines["histogram"], "neighbours_bits": baselines["neighbours"],
    }  # fmt: skip
    lines = [
        [run.member, f"{value:.4f}"],
        ["four neighbours, counted", f"{baselines['neighbours']:.4f}"],
        ["histogram of every place", f"{baselines['histogram']:.4f}"],
    ]
    text = (
        heading(subject, data, split.name),
        f"{main.text(value)}; {scored} of {plural(per_image, 'value')} of each of {plural(len(pixels), 'image')} "
        f"scored{', the class being told' if labels is not None else ''}\n",
        TextTable(("model", "bits per dimension"), lines, (1,)),
    )
    identity, metrics = identity_of_part(data, split.name, same), {main: value}
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task="image", since=started_at)


def labels_of(run: TrainedRun, data: ImageData, labels: np.ndarray | None) -> Tensor | None:
    """Return the numbers int64 [images] that ``run`` gave to the classes of images, ``labels`` being those of ``data``;
    None where its model takes no classes."""
    input: PixelInput = input_of(run.config)
    if not input.classes:
        return None
    if labels is None:
        raise KinformerError(
            f"{data.name}: has no classes, but {run.folder} draws images of a class; give images with labels."
        )
    return torch.from_numpy(numbers_of(run, data.name, data.classes)[labels])


def nats_of_images(
    count: int, rows: int, score: Callable[[slice], tuple[Tensor, Tensor]], model: StackedCausalModel, quiet: bool
) -> tuple[float, float]:
    """Return the nats of all values of ``count`` images and of those at the first position, ``rows`` images at a time:
    ``score`` returns the logits of a part of them by ``model``, and its values."""
    scored, total, first = nats_of(model), 0.0, 0.0
    with torch.inference_mode(), progressing(quiet) as progress:
        for start in range(0, count, rows):
            end = min(start + rows, count)
            nats = scored(*score(slice(start, end))).double()
            total, first = total + float(nats.sum()), first + float(nats[:, 0].sum())
            if progress is not None:
                progress(end, count)
    return total, first
