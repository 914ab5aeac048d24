"""Bits per dimension of large images over small ones, beside what counting finds."""

from __future__ import annotations

import time
from math import isfinite, log

import numpy as np
from torch import Tensor

from kinformer.core.model import SourceModel, device_of
from kinformer.data.image_floors import floor_over_source, floors
from kinformer.runtime.errors import choose, require_finite
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.image.evaluate import data_of, nats_of_images
from kinformer.tasks.image.rows import shifted
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.image_options import FirstImages
from kinformer.tasks.shared.text import heading, identity_of_part, note_other_data
from kinformer.tasks.super_resolution.rows import EnlargingSequences
from kinformer.training.metric import BITS_PER_DIM


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: FirstImages, quiet: bool
) -> Evaluation:
    """Evaluate a run on the images of a split, every value scored."""
    run, started_at = subject.run, time.perf_counter()
    data = data_of(run, evaluation_settings.data)
    split = data.splits[choose(evaluation_settings.split, data.splits, "`split`")]
    same = note_other_data(run, data, evaluation_settings.data is not None)
    pixels, sequences = np.asarray(split.pixels[: task_options.max_items]), EnlargingSequences(run.config)
    model: SourceModel = subject.model

    def score(part: slice) -> tuple[Tensor, Tensor]:
        values, source = (item.to(device_of(model)) for item in sequences.of(pixels[part]))
        return model(shifted(values), model.begin(source))[0], values

    rows = max(1, evaluation_settings.chunk // len(sequences.large.order))
    nats, _ = nats_of_images(len(pixels), rows, score, subject.model, quiet)
    require_finite(isfinite(nats))
    value = nats / log(2) / pixels.size
    baselines = {"source": floor_over_source(data.train.pixels, pixels, sequences.factor)}
    baselines["neighbours"] = floors(data.train.pixels, pixels)["neighbours"]
    lines = [
        [run.member, f"{value:.4f}"],
        ["small image and three neighbours, counted", f"{baselines['source']:.4f}"],
        ["four neighbours, counted", f"{baselines['neighbours']:.4f}"],
    ]
    small, dimensions = sequences.small.input, pixels[0].size
    text = (
        heading(subject, data, split.name),
        f"{BITS_PER_DIM.text(value)}, over images of {small.height} x {small.width}; {plural(dimensions, 'value')} of "
        f"each of {plural(len(pixels), 'image')} scored\n",
        TextTable(("model", "bits per dimension"), lines, (1,)),
    )
    facts = {
        "images": len(pixels), "dimensions": dimensions, "source_size": [small.height, small.width],
        "source_bits": baselines["source"], "neighbours_bits": baselines["neighbours"],
    }  # fmt: skip
    identity, task = identity_of_part(data, split.name, same), "super-resolution"
    return evaluated(
        subject, {BITS_PER_DIM: value}, identity, text, facts=facts, baselines=baselines, task=task, since=started_at
    )
