"""How well a run predicts the masked patches of held-out images, beside the mean of every patch."""

from __future__ import annotations

import time
from math import isfinite, prod
from typing import NamedTuple

import numpy as np
import torch

from kinformer.core.model import device_of
from kinformer.data import ImageData, Images, read_images
from kinformer.runtime.errors import KinformerError, choose, require_finite
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.mae.loss import PatchModel, masked_of, predict_patches, targets_of
from kinformer.tasks.mae.options import MaeOptions
from kinformer.tasks.mae.rows import MASKED_ERROR, held_out
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.image_options import FirstImages
from kinformer.tasks.shared.text import heading, identity_of_part, note_other_data, spec_of
from kinformer.tasks.shared.views import PatchInput, input_of

AT_ONCE = 64


def measure_patches(
    model: PatchModel, images: Images, count: int, options: MaeOptions, progress: ProgressCallback | None = None
) -> tuple[float, float]:
    """Return the mean squared error of the masked patches of the first ``count`` of ``images``: the model's, and that
    of predicting each patch's own mean (of raw pixels: the mean of all images)."""
    input: PatchInput = input_of(model.config)
    patches = prod(input.replace(size=images.shape[:2]).grid)
    total, plain, masked = 0.0, 0.0, 0
    with torch.inference_mode():
        for first in range(0, count, AT_ONCE):
            index = np.arange(first, min(first + AT_ONCE, count))
            batch = held_out(images, index, patches, options.masked)
            batch = batch._replace(images=batch.images.to(device_of(model)), seen=batch.seen.to(device_of(model)))
            targets = targets_of(model, batch.images, options.raw_pixels).values
            chosen = masked_of(batch, patches)
            errors = (predict_patches(model, batch).to(targets.dtype) - targets).square().mean(-1)
            total, plain = total + float(errors[chosen].sum()), plain + float(targets.square().mean(-1)[chosen].sum())
            masked += int(chosen.sum())
            require_finite(isfinite(total))
            if progress is not None:
                progress(first + len(index), count)
    return total / masked, plain / masked


class HeldOut(NamedTuple):
    """The images that a run is measured on: the first ``images`` of the split ``part`` of ``data``, which are its own
    data where they are the ``same``."""

    data: ImageData
    part: Images
    images: int
    same: bool


def held_out_images(run: TrainedRun, settings: EvaluationSettings, options: FirstImages) -> HeldOut:
    """Return the images that ``settings`` name, or those of ``run``."""
    data = read_images(spec_of(run, settings.data), holdout=run.data.get("holdout"), size=run.options.resize)
    input: PatchInput = input_of(run.config)
    same, reads = note_other_data(run, data, settings.data is not None), input.channels
    if data.shape[2] != reads:
        raise KinformerError(
            f"{data.name}: its images have {plural(data.shape[2], 'channel')}, but {run.folder} reads {reads}; "
            "give others."
        )
    part = data.splits[choose(settings.split, data.splits, "`split`")]
    return HeldOut(data, part, len(part) if options.max_items is None else min(options.max_items, len(part)), same)


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: FirstImages, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out images, each always with the same mask."""
    run, model = subject.run, subject.model
    result, part, count, same = held_out_images(run, evaluation_settings, task_options)
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        error, mean = measure_patches(model, part, count, run.options, progress)
    what = "pixels" if run.options.raw_pixels else "pixels in units of each patch's deviation"
    text = (
        heading(subject, result, evaluation_settings.split),
        f"{MASKED_ERROR.text(error)} ({what}), {mean:.4f} by the mean: {plural(count, 'image')}, "
        f"{run.options.masked:.0%} of each masked",
    )
    baselines = {"mean": mean}
    facts = {"mean_error": mean, "measured_images": count, "masked": run.options.masked}
    identity = identity_of_part(result, evaluation_settings.split, same)
    metrics = {MASKED_ERROR: error}
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task="mae", since=started_at)
