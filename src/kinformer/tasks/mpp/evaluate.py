"""How well a run predicts the colours of corrupted patches of held-out images, beside counting the colours."""

from __future__ import annotations

import time
from math import isfinite, log

import numpy as np
import torch

from kinformer.core.model import device_of
from kinformer.data import ImageData, Images
from kinformer.runtime.errors import require_finite
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.mae.evaluate import AT_ONCE, held_out_images
from kinformer.tasks.mae.loss import PatchModel
from kinformer.tasks.mae.rows import MASKS
from kinformer.tasks.mpp.loss import colours_of, nats_of, sizes_of
from kinformer.tasks.mpp.rows import BITS_PER_COLOUR, MppBatch, corrupted_patches
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.image_options import FirstImages
from kinformer.tasks.shared.text import heading, identity_of_part
from kinformer.tasks.shared.views import PatchModule, part_of
from kinformer.tasks.vision.fit import LOOKED_AT
from kinformer.tasks.vision.rows import pixels_of
from kinformer.training.batch import map_fields
from kinformer.training.metric import ACCURACY


def measure_colours(
    model: PatchModel,
    images: Images,
    count: int,
    share: float,
    costs: np.ndarray,
    progress: ProgressCallback | None = None,
) -> tuple[float, float, float]:
    """Return bits per colour of the corrupted patches of the first ``count`` of ``images``, the share of colours that
    are the most probable ones, and the bits by ``costs`` [colours], those of each colour."""
    device, sums, corrupted = device_of(model), np.zeros(3), 0
    table, sizes = torch.from_numpy(costs).to(device), sizes_of(model)
    input: PatchModule = part_of(model, "input")
    with torch.inference_mode():
        for first in range(0, count, AT_ONCE):
            index = np.arange(first, min(first + AT_ONCE, count))
            pixels = pixels_of(images, index)
            patches = input.length(pixels) - input.config.before
            batch = MppBatch(pixels, *corrupted_patches(patches, share, index, 0, MASKS))
            batch = map_fields(batch, lambda field: field.to(device))
            colours = colours_of(batch.images, *sizes)
            nats, right = nats_of(model, batch, colours)
            chosen = batch.corrupted
            sums += [float(item[chosen].double().sum()) for item in (nats, right, table[colours])]
            corrupted += int(chosen.sum())
            require_finite(isfinite(sums[0]))
            if progress is not None:
                progress(first + len(index), count)
    bits, accuracy, counted = sums / corrupted
    return bits / log(2), accuracy, counted


def counted_colours(data: ImageData, model: PatchModel) -> np.ndarray:
    """Return the bits of each colour by how often it is that of a patch of the training images, each once more."""
    patch, bits = sizes_of(model)
    counts = np.ones(2 ** (bits * data.shape[2]))
    images = min(len(data.train), LOOKED_AT)
    for first in range(0, images, AT_ONCE):
        pixels = pixels_of(data.train, np.arange(first, min(first + AT_ONCE, images)))
        counts += np.bincount(colours_of(pixels, patch, bits).flatten().numpy(), minlength=len(counts))
    return -np.log2(counts / counts.sum())


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: FirstImages, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out images, each always corrupted alike."""
    run, model = subject.run, subject.model
    result, part, count, same = held_out_images(run, evaluation_settings, task_options)
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        costs = counted_colours(result, model)
        bits, accuracy, counted = measure_colours(model, part, count, run.options.corrupted, costs, progress)
    measured = f"{BITS_PER_COLOUR.text(bits)}, {counted:.4f} by counting; {ACCURACY.text(accuracy)}"
    text = (
        heading(subject, result, evaluation_settings.split),
        f"{measured}: {plural(count, 'image')}, {run.options.corrupted:.0%} of each corrupted",
    )
    facts = {"counted_bits": counted, "measured_images": count, "corrupted": run.options.corrupted}
    identity = identity_of_part(result, evaluation_settings.split, same)
    metrics = {BITS_PER_COLOUR: bits, ACCURACY: accuracy}
    baselines = {"counted": counted}
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task="mpp", since=started_at)
