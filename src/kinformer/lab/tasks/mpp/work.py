"""The task of corrupted patches (Dosovitskiy et al. 2020, appendix B.1.2): how a model fits, its rows, the objective,
and its measures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import isfinite, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.encoder import GridOnly
from kinformer.core.model import device_of
from kinformer.core.state import State
from kinformer.lab.data import ImageData, Images
from kinformer.lab.data.sampling import mix
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.lab.tasks.mae.work import AT_ONCE, MASKS, PatchModel, PatchRows, held_out_images
from kinformer.lab.tasks.mpp import MppOptions
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import FirstImages
from kinformer.lab.tasks.shared.records import PatchInput, PatchModule, input_of, part_of
from kinformer.lab.tasks.shared.text import heading, identity_of_part
from kinformer.lab.tasks.vision.work import LOOKED_AT, check_images_read, fitted, pixels_of
from kinformer.lab.training.data_module import ObjectiveOutput, map_fields
from kinformer.lab.training.logging import ACCURACY, Metric
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.progress import ProgressCallback, progressing

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.tasks.task import TrainingPlan


# How an encoder is fitted to corrupted patches: its head predicts their colours.

HEAD, STAGES = "patch_colours", "stages"


def fitted_to_colours(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return overrides: the input as for classes, and a head that predicts colours, unless there is one already."""
    changes = {name: value for name, value in fitted(config, data, 2).items() if not name.startswith("head")}
    return changes if config.head.kind == HEAD else changes | {"head": HEAD}


def keeps_patches(config: ModelConfig) -> bool:
    """Return whether an encoder of ``config`` ends with the patches that it began with, and nothing else."""
    return config.stack.kind != STAGES and not _has_global_tokens(config)


def _has_global_tokens(config: ModelConfig) -> bool:
    return bool(part_of(config, "global_tokens")) or part_of(config, "global_input") is not None


def check_colours(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model that predicts something else, or whose last layer has other positions than its first."""
    check_images_read(plan, model)
    config = plan.config
    if config.head.kind != HEAD:
        raise KinformerError(f"`set` head={config.head.kind}: predicts no colours; leave it out.")
    if isinstance(model.stack, GridOnly):
        raise KinformerError(
            f"the stack {config.stack.kind!r} merges patches, so that none is left to have a colour; give a member "
            "such as vit or deit."
        )
    if _has_global_tokens(config):
        raise KinformerError("the task mpp is for encoders without global tokens; give a member such as vit or deit.")


# Images with some of their patches corrupted, which hashes of the step and the row alone draw.

BITS_PER_COLOUR = Metric("bits_per_colour", "bits per colour of a corrupted patch")
MASKED_OF_10, OTHER_OF_10 = 8, 1
"""How many of ten corrupted patches are masked, and how many become another patch; the rest stay (B.1.2)."""
MASKED = -1


class MppBatch(NamedTuple):
    """``images`` [rows, channels, height, width], uint8 or floats from 0 to 1; ``sources`` int64 [rows, patches], which
    patch stands in each place, ``MASKED`` where none does; ``corrupted`` bool [rows, patches], whose colours are
    predicted."""

    images: Tensor
    sources: Tensor
    corrupted: Tensor

    @property
    def size(self) -> int:
        """Return how many patches are read."""
        return self.sources.numel()


def corrupted_patches(patches: int, share: float, rows: np.ndarray, *key: int) -> tuple[Tensor, Tensor]:
    """Return ``sources`` and ``corrupted`` of this many ``patches`` of each image, which the number of its row and
    ``key`` decide."""
    if patches < 2:
        raise KinformerError("an image of one patch has no others to be known by; give a smaller `set` input.patch.")
    numbers = np.arange(patches)[None]
    order, kinds, others = (mix(*key, draw, rows[:, None], numbers) for draw in range(3))
    chosen = np.argsort(order, axis=1, kind="stable")[:, : max(1, round(patches * share))]
    corrupted = np.zeros(order.shape, bool)
    np.put_along_axis(corrupted, chosen, True, 1)
    other = (others % np.uint64(patches - 1)).astype(np.int64)
    other += other >= numbers  # any patch but that of the place itself
    kind = kinds % np.uint64(10)
    replaced = np.where(kind < MASKED_OF_10, MASKED, np.where(kind < MASKED_OF_10 + OTHER_OF_10, other, numbers))
    return torch.from_numpy(np.where(corrupted, replaced, numbers)), torch.from_numpy(corrupted)


class MppRows(PatchRows[MppOptions, MppBatch]):
    """Training images in an order of their own in every epoch; the first of the validation images, always corrupted
    alike."""

    sums = ("nats", "right")
    metrics = (BITS_PER_COLOUR, ACCURACY)

    def laid(self, images: Tensor, rows: np.ndarray, *key: int) -> MppBatch:
        return MppBatch(images, *corrupted_patches(self.patches, self.options.corrupted, rows, *key))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_COLOUR.name: means["nats"] / log(2), ACCURACY.name: means["right"]}


# The objective of masked patch prediction (Dosovitskiy et al. 2020, ViT, appendix B.1.2).
#
#     loss = mean over corrupted patches i of -log p(colour of i),    colour = floor(2^bits mean of i), by channel
#
# The mean is that of the patch's pixels, from 0 to 1, before it was corrupted.


def colours_of(images: Tensor, patch: int, bits: int) -> Tensor:
    """Return the colours int64 [rows, patches] of the patches of ``images`` [rows, channels, height, width], in base
    2^bits, the first channel first. A patch over the border has the mean of its pixels inside."""
    scale = 255 if images.dtype == torch.uint8 else 1
    pixels = images.to(torch.promote_types(images.dtype, torch.float32)) / scale
    means = functional.avg_pool2d(pixels, patch, ceil_mode=True).flatten(2)
    levels = (means * 2**bits).floor().clamp(0, 2**bits - 1).long()
    places = 2 ** (bits * torch.arange(levels.shape[1], device=images.device))
    return (levels * places[:, None]).sum(1)


def sizes_of(model: PatchModel) -> tuple[int, int]:
    """Return the pixels of a patch's side, and the bits of a channel's colour."""
    input: PatchInput = input_of(model.config)
    return input.patch, part_of(model.config.head, "bits")


def predict_colours(model: PatchModel, batch: MppBatch) -> Tensor:
    """Return the logits [rows, patches, colours] that the model predicts from the corrupted images."""
    states = model.hidden_of(batch.images, sources=batch.sources, mask=part_of(model.head, "mask"))
    return model.head(states, model.input)


class PatchColours:
    """The objective; metrics are summed over corrupted patches."""

    def __call__(self, model: PatchModel, batch: MppBatch, state: State, progress: float) -> ObjectiveOutput:
        colours = colours_of(batch.images, *sizes_of(model))
        nats, right = nats_of(model, batch, colours)
        chosen, zero = batch.corrupted, nats.new_zeros(())
        total, count = torch.where(chosen, nats, zero).sum(), chosen.sum()
        return total / count, {"nats": total.detach(), "right": (right & chosen).sum(), "predicted": count}, None


def nats_of(model: PatchModel, batch: MppBatch, colours: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every patch -log p of its colour, and whether that is the most probable one, [rows, patches];
    ``colours`` are those of ``batch``."""
    logits = predict_colours(model, batch)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = functional.cross_entropy(logits.flatten(0, 1), colours.flatten(), reduction="none")
    return nats.view_as(colours), logits.argmax(-1) == colours


# How well a run predicts the colours of corrupted patches of held-out images, beside counting the colours.


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
