"""Images with some of their patches hidden, which an encoder learns without labels to predict.

The task mae predicts pixels (MAE, He et al. 2022), the task mpp colours (masked patch prediction; Dosovitskiy et al.
2020, appendix B.1.2). A training row is an image with a choice of its patches, here 4 x 4 of them:

    image           mae: the encoder reads        mpp: the encoder reads
    a b c d         . . c .                       a # c d        # mask
    e f g h         . f . .                       # f a h        a in place of g: another patch
    i j k l         . . . l                       i # k #        k stays, but its colour is predicted too
    m n o p         m . . .                       # n # p
                    the head predicts the         the head predicts the mean colour of
                    pixels of all dots            b, e, g, j, k, l, m and o
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from math import isfinite, log, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.encoder import GridOnly
from kinformer.core.model import WholeModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State
from kinformer.inputs.images import Patches
from kinformer.lab.data import ImageData, Images
from kinformer.lab.data.images import write_png
from kinformer.lab.data.sampling import in_epochs, mix
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Made,
    Write,
    input_of,
    part_of,
    parts_of,
)
from kinformer.lab.tasks.image import OCCLUDED, grid
from kinformer.lab.tasks.images import Augmented, augment, laid, pictures, png_of
from kinformer.lab.tasks.options import MaeGenerationOptions, MaeOptions
from kinformer.lab.tasks.task import GenerationSettings, TrainingPlan
from kinformer.lab.tasks.vision import (
    LOOKED_AT,
    HeldOutRows,
    check_channels,
    check_images_read,
    fitted,
    held_out_images,
    pixels_of,
)
from kinformer.lab.training.data_module import Batch, DataModule, ObjectiveOutput, map_fields, take_rows
from kinformer.lab.training.logging import ACCURACY, Metric
from kinformer.models.encoder import Encoder
from kinformer.runtime.errors import KinformerError, plural, require_finite

# Images, and which of their patches are seen: drawn by hashes of the step and the row alone.

MASKED_ERROR = Metric("masked_error", "mean squared error of masked patches")
_ORDER, _CHANGES, MASKS = 16, 17, 18


class MaeBatch(NamedTuple):
    """``images`` [rows, channels, height, width], uint8 or floats from 0 to 1; ``seen`` int64 [rows, n], the numbers of
    the patches that the encoder sees, ascending."""

    images: Tensor
    seen: Tensor

    @property
    def size(self) -> int:
        return self.seen.numel()


def seen_count(patches: int, masked: float) -> int:
    """Return how many of ``patches`` are seen, one at least, where the share ``masked`` is not."""
    count = max(1, round(patches * (1 - masked)))
    if count >= patches:
        raise KinformerError(
            f"`masked` {masked:g}: leaves none of {plural(patches, 'patch')} to predict; give more, or a "
            "smaller `set` input.patch."
        )
    return count


def seen_patches(patches: int, masked: float, rows: np.ndarray, *key: int) -> Tensor:
    """Return the numbers int64 [rows, n] of random seen patches of each image, by its row's number and ``key``."""
    order = np.argsort(mix(*key, rows[:, None], np.arange(patches)[None]), axis=1, kind="stable")
    return torch.from_numpy(np.sort(order[:, : seen_count(patches, masked)], axis=1))


def patches_of(config: ModelConfig, images: ImageData | Images) -> int:
    """Return how many patches ``images`` have for a model of ``config``."""
    input: Patches.Config = input_of(config)
    return prod(input.replace(size=images.shape[:2]).grid)


class PatchRows(HeldOutRows):
    """Training images in a new order in every epoch, and the first validation images, always with the same masks."""

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__(plan)
        self.patches = patches_of(plan.config, plan.data)

    @abstractmethod
    def laid(self, images: Tensor, rows: np.ndarray, *key: int) -> Batch:
        """Return a batch of ``images``, masked as the numbers of its rows and ``key`` decide."""

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Make the whole step's rows in every process, so that images change alike whatever their number."""
        rows, seed = self.settings.batch_size, self.settings.seed
        place = np.arange(step * rows, (step + 1) * rows)
        images = pixels_of(self.data.train, in_epochs(place, len(self.data.train), seed, _ORDER))
        if names := self.options.augmentations:
            generator = torch.Generator().manual_seed(int(mix(seed, _CHANGES, step)[0] >> np.uint64(1)))
            labels = torch.zeros(rows, dtype=torch.int64)
            images = augment(Augmented(images.float() / 255, labels), names, generator).images
        batch = self.laid(images, place, seed, MASKS)
        return take_rows(batch, slice(rank * (rows // world), (rank + 1) * (rows // world)))

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        """Yield the process's images; where the last cannot be shared evenly, some are measured twice."""
        for index, _ in self.shares(rank, world):
            yield self.laid(pixels_of(self.data.validation, index), index, 0, MASKS)


class MaeRows(PatchRows):
    """Rows of images and of the seen patches of each."""

    sums = ("error",)
    metrics = (MASKED_ERROR,)

    def laid(self, images: Tensor, rows: np.ndarray, *key: int) -> MaeBatch:
        return MaeBatch(images, seen_patches(self.patches, self.options.masked, rows, *key))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {MASKED_ERROR.name: means["error"]}


# How an encoder is fitted to masked patches: its head becomes a decoder of pixels, about a third as deep and half as
# wide as the encoder, as the paper's 8 layers of 512 are to the 24 of 1,024 of ViT-L.

PIXEL_HEAD = "masked_patches"
NARROWER, SHALLOWER, HEAD_DIM = 2, 3, 32


def fitted_input(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return the overrides of the input, as for classes of images."""
    return {name: value for name, value in fitted(config, data, 2).items() if not name.startswith("head")}


def fitted_to_masks(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return overrides: the input as for classes, and a head that predicts pixels, unless there is one already."""
    changes = fitted_input(config, data)
    if config.head.kind == PIXEL_HEAD:
        return changes
    heads = max(1, config.dim // NARROWER // HEAD_DIM)
    dim = max(1, config.dim // NARROWER // (4 * heads)) * 4 * heads
    norm, mixer = {"kind": "layer_norm", "eps": 1e-6}, {"kind": "bidirectional", "num_heads": heads}
    layer = {"kind": "encoder", "mixer": mixer, "norm": norm, "residual": {"kind": "pre"}}
    layers = [layer] * max(1, len(config.layers) // SHALLOWER)
    return changes | {"head": {"kind": PIXEL_HEAD, "dim": dim, "layers": layers}}


def suits_masks(config: ModelConfig) -> bool:
    """Return whether an encoder of ``config``, which reads patches, can leave patches out."""
    return config.protocol is WholeModel and config.input.kind == "patches" and mixer_of_places(config) is None


def check_masks(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model whose layers need the omitted patches, or the places of patches."""
    check_channels(plan)
    config = plan.config
    if config.head.kind != PIXEL_HEAD:
        raise KinformerError(f"`set` head={config.head.kind}: predicts no pixels; leave it out.")
    seen_count(patches_of(config, plan.data), plan.options.masked)
    placed = mixer_of_places(config)
    if placed is not None:
        raise KinformerError(
            f"the encoder leaves masked patches out, so that its layers must know a patch's place by its vector "
            f"alone, but the mixer {placed!r} here goes by neighbours or distances; give a member such as vit or deit."
        )


def mixer_of_places(config: ModelConfig) -> str | None:
    """Return the kind of a mixer of ``config`` that knows patches by their places, None where there is none."""
    for mixer in (layer.mixer for layer in config.layers):
        if [getattr(getattr(mixer, name, None), "kind", None) for name in ("pattern", "position")] != ["full", "none"]:
            return str(mixer.kind)
    return None


# The objective of masked patches (He et al. 2022, MAE, section 3).
#
#     loss = mean over masked patches i of |t_i - d(e(x_seen))_i|^2 / pixels,    t = (x - mean x) / sqrt(var x + 1e-6)
#
# e is the model up to its head and gets only the seen patches; d is the head. Mean and variance are taken over the
# pixels of the patch; with ``raw_pixels`` t = x.

EPS = 1e-6


class Targets(NamedTuple):
    """The targets ``values`` [rows, patches, pixels]: the pixels less ``mean``, divided by ``scale``."""

    values: Tensor
    mean: Tensor
    scale: Tensor


def targets_of(model: Encoder, images: Tensor, raw_pixels: bool) -> Targets:
    """Return the targets of all patches."""
    input: Patches = part_of(model, "input")
    pixels = input.cut(images)
    pixels = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
    if raw_pixels:
        nothing = torch.zeros_like(pixels[..., :1])
        return Targets(pixels, nothing, nothing + 1)
    mean = pixels.mean(-1, keepdim=True)
    # As in the authors' code, whose variance is the unbiased one; it is undefined for a patch of one pixel, where the
    # plain variance, 0, is used.
    variance = pixels.var(-1, keepdim=True, correction=min(1, pixels.shape[-1] - 1))
    scale = (variance + EPS).sqrt()
    return Targets((pixels - mean) / scale, mean, scale)


def predict_patches(model: Encoder, batch: MaeBatch) -> Tensor:
    """Return the targets of all patches as the model predicts them from the seen ones, [rows, patches, pixels]."""
    input: Patches = part_of(model, "input")
    before = input.config.before
    tokens = torch.arange(before, device=batch.seen.device).expand(len(batch.seen), -1)
    chosen = torch.cat([tokens, batch.seen + before], 1)
    states = model.hidden_of(batch.images, chosen)
    return model.head(states, input, chosen=chosen, grid=input.grid(batch.images))


def masked_of(batch: MaeBatch, patches: int) -> Tensor:
    """Return which patches are not seen, bool [rows, patches]."""
    everything = torch.ones(len(batch.seen), patches, dtype=torch.bool, device=batch.seen.device)
    return everything.scatter(1, batch.seen, False)


class MaskedPatches:
    """The objective; a metric is summed over masked patches."""

    def __init__(self, options: MaeOptions) -> None:
        self.options = options

    @classmethod
    def of(cls, model: Encoder, data: DataModule | None) -> MaskedPatches:
        """Make the objective with the options of the rows ``data``."""
        return cls(data.options if isinstance(data, MaeRows) else MaeOptions())

    def __call__(self, model: Encoder, batch: MaeBatch, state: State, progress: float) -> ObjectiveOutput:
        errors = errors_of(model, batch, targets_of(model, batch.images, self.options.raw_pixels).values)
        masked = masked_of(batch, errors.shape[1])
        error, count = torch.where(masked, errors, errors.new_zeros(())).sum(), masked.sum()
        return error / count, {"error": error.detach(), "predicted": count}, None


def errors_of(model: Encoder, batch: MaeBatch, targets: Tensor) -> Tensor:
    """Return the mean squared errors [rows, patches] of the predictions of ``targets`` [rows, patches, pixels]."""
    return (predict_patches(model, batch).to(targets.dtype) - targets).square().mean(-1)


# How well a run predicts the masked patches of held-out images, beside the mean of every patch.

AT_ONCE = 64


def means_of(count: int, quiet: bool, score: Callable[[np.ndarray], tuple[Tensor, ...]]) -> list[float]:
    """Return the means of values over the chosen patches of ``count`` images; of images by their numbers, ``score``
    returns which patches are chosen, [rows, patches], and then their values."""
    sums, patches = np.zeros(1), 0
    with torch.inference_mode():
        for part in parts_of(count, AT_ONCE, quiet):
            chosen, *values = score(np.arange(part.start, part.stop))
            sums = sums + [float(value[chosen].double().sum()) for value in values]
            patches += int(chosen.sum())
            require_finite(isfinite(sums[0]))
    return (sums / patches).tolist()


def evaluate(subject: LoadedRun, settings: EvaluationSettings, options: object, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out images, each always with the same mask."""
    run, model, device = subject.run, subject.model, device_of(subject.model)
    held, count = held_out_images(run, settings)
    started_at, patches = time.perf_counter(), patches_of(model.config, held.split)

    def score(index: np.ndarray) -> tuple[Tensor, ...]:
        seen = seen_patches(patches, run.options.masked, index, 0, MASKS)
        batch = map_fields(MaeBatch(pixels_of(held.split, index), seen), lambda field: field.to(device))
        # beside the model: predicting each patch's own mean (of raw pixels, the mean of all images)
        targets = targets_of(model, batch.images, run.options.raw_pixels).values
        return masked_of(batch, patches), errors_of(model, batch, targets), targets.square().mean(-1)

    error, mean = means_of(count, quiet, score)
    what = "pixels" if run.options.raw_pixels else "pixels in units of each patch's deviation"
    text = (
        f"{MASKED_ERROR.text(error)} ({what}), {mean:.4f} by the mean: {plural(count, 'image')}, "
        f"{run.options.masked:.0%} of each masked",
    )
    baselines, metrics = {"mean": mean}, {MASKED_ERROR: error}
    facts = {"mean_error": mean, "measured_images": count, "masked": run.options.masked}
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="mae", since=started_at)


# Images completed from some of their patches, written as a PNG beside the seen patches and the images themselves.


def complete(subject: LoadedRun, prompt: None, options: GenerationSettings, write: Write = None) -> Made:
    """Complete pictures: a line of three for each. The seen patches stand in it unchanged.
    Where a run predicts deviations, the mean and the deviation of a masked patch are the image's own."""
    run, model = subject.run, subject.model
    input: Patches = model.input
    task_options: MaeGenerationOptions = options.task_options
    out = png_of(run, task_options.out, "completed.png")
    shown = list(pictures(run, task_options.image or run.data["spec"], options.samples))
    images, started_at = laid(shown, model), time.perf_counter()
    patches = prod(input.grid(images))
    seen = seen_patches(patches, run.options.masked, np.arange(len(images)), options.seed or 0)
    batch = MaeBatch(images, seen.to(device_of(model)))
    with torch.inference_mode():
        targets, original = targets_of(model, images, run.options.raw_pixels), input.cut(images)
        made = predict_patches(model, batch).to(targets.mean.dtype) * targets.scale + targets.mean
        require_finite(bool(made.isfinite().all()))
        masked = masked_of(batch, patches)[..., None]
        made = torch.where(masked, made, original)
    seconds = time.perf_counter() - started_at
    veil = masked.expand_as(original)
    lines = [_pixels(input, original, images, veil), _pixels(input, made, images), images.cpu().numpy()]
    sheet = np.stack(lines, 1).reshape(-1, *images.shape[1:]).transpose(0, 2, 3, 1)
    write_png(out, grid(np.ascontiguousarray(sheet), len(lines)))
    facts = {"run": str(run.folder), "out": str(out), "images": len(images), "seen": seen.shape[1], "patches": patches,
             "seconds": seconds, "seed": options.seed}  # fmt: skip
    of = "" if run.options.raw_pixels else "; mean and deviation of masked patches are the image's own"
    return Made(facts, f"{out}: {plural(len(images), 'image')} of {seen.shape[1]} of {patches} patches each{of}")


def _pixels(input: Patches, patches: Tensor, images: Tensor, veil: Tensor | None = None) -> np.ndarray:
    """Return normalised ``patches`` as images uint8 [images, channels, height, width], grey under the ``veil``."""
    config, (rows, columns) = input.config, input.grid(images)
    side, channels = config.patch, config.channels

    def joined(x: Tensor) -> Tensor:
        x = x.view(len(x), rows, columns, channels, side, side).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(len(x), channels, rows * side, columns * side)[..., : images.shape[2], : images.shape[3]]

    x = joined(patches)
    for numbers, change in ((config.std, torch.mul), (config.mean, torch.add)):
        if numbers:
            x = change(x, torch.tensor(numbers, dtype=x.dtype, device=x.device)[:, None, None])
    x = (255 * x).round().clamp(0, 255)
    if veil is not None:
        x = torch.where(joined(veil), x.new_tensor(float(OCCLUDED)), x)
    return x.to(torch.uint8).cpu().numpy()


# How an encoder is fitted to corrupted patches: its head predicts their colours.

COLOUR_HEAD, STAGES = "patch_colours", "stages"


def fitted_to_colours(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return overrides: the input as for classes, and a head that predicts colours, unless there is one already."""
    changes = fitted_input(config, data)
    return changes if config.head.kind == COLOUR_HEAD else changes | {"head": COLOUR_HEAD}


def suits_colours(config: ModelConfig) -> bool:
    """Return whether an encoder of ``config`` reads patches, and ends with these patches and nothing else."""
    reads = config.protocol is WholeModel and config.input.kind == "patches"
    return reads and config.stack.kind != STAGES and not _has_global_tokens(config)


def _has_global_tokens(config: ModelConfig) -> bool:
    return bool(part_of(config, "global_tokens")) or part_of(config, "global_input") is not None


def check_colours(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model that predicts something else, or whose last layer has other positions than its first."""
    check_images_read(plan, model)
    config = plan.config
    if config.head.kind != COLOUR_HEAD:
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
        return self.sources.numel()


def corrupted_patches(patches: int, share: float, rows: np.ndarray, *key: int) -> tuple[Tensor, Tensor]:
    """Return ``sources`` and ``corrupted`` of ``patches`` patches of each image, by its row's number and ``key``."""
    if patches < 2:
        raise KinformerError(
            "an image of one patch does not have other patches to predict it from; give a smaller `set` input.patch."
        )
    numbers = np.arange(patches)[None]
    order, kinds, others = (mix(*key, draw, rows[:, None], numbers) for draw in range(3))
    chosen = np.argsort(order, axis=1, kind="stable")[:, : max(1, round(patches * share))]
    corrupted = np.zeros(order.shape, bool)
    np.put_along_axis(corrupted, chosen, True, 1)
    other = (others % np.uint64(patches - 1)).astype(np.int64)
    other += other >= numbers  # any patch but the patch of the place itself
    kind = kinds % np.uint64(10)
    replaced = np.where(kind < MASKED_OF_10, MASKED, np.where(kind < MASKED_OF_10 + OTHER_OF_10, other, numbers))
    return torch.from_numpy(np.where(corrupted, replaced, numbers)), torch.from_numpy(corrupted)


class MppRows(PatchRows):
    """Training images in a new order in every epoch, and the first validation images, always corrupted alike."""

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
# The mean is over the patch's pixels, from 0 to 1, before the corruption.


def colours_of(images: Tensor, patch: int, bits: int) -> Tensor:
    """Return the colours int64 [rows, patches] of the patches of ``images`` [rows, channels, height, width], in base
    2^bits, the first channel first. A patch over the border has the mean of its pixels inside."""
    scale = 255 if images.dtype == torch.uint8 else 1
    pixels = images.to(torch.promote_types(images.dtype, torch.float32)) / scale
    means = functional.avg_pool2d(pixels, patch, ceil_mode=True).flatten(2)
    levels = (means * 2**bits).floor().clamp(0, 2**bits - 1).long()
    places = 2 ** (bits * torch.arange(levels.shape[1], device=images.device))
    return (levels * places[:, None]).sum(1)


def sizes_of(model: Encoder) -> tuple[int, int]:
    """Return the pixels of a patch's side, and the bits of a channel's colour."""
    input: Patches.Config = input_of(model.config)
    return input.patch, part_of(model.config.head, "bits")


def predict_colours(model: Encoder, batch: MppBatch) -> Tensor:
    """Return the logits [rows, patches, colours] that the model predicts from the corrupted images."""
    states = model.hidden_of(batch.images, sources=batch.sources, mask=part_of(model.head, "mask"))
    return model.head(states, model.input)


class PatchColours:
    """The objective; metrics are summed over corrupted patches."""

    def __call__(self, model: Encoder, batch: MppBatch, state: State, progress: float) -> ObjectiveOutput:
        colours = colours_of(batch.images, *sizes_of(model))
        nats, right = nats_of(model, batch, colours)
        chosen, zero = batch.corrupted, nats.new_zeros(())
        total, count = torch.where(chosen, nats, zero).sum(), chosen.sum()
        return total / count, {"nats": total.detach(), "right": (right & chosen).sum(), "predicted": count}, None


def nats_of(model: Encoder, batch: MppBatch, colours: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every patch -log p of its colour, and whether the colour is the most probable one, [rows, patches];
    ``colours`` are the colours of ``batch``."""
    logits = predict_colours(model, batch)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = functional.cross_entropy(logits.flatten(0, 1), colours.flatten(), reduction="none")
    return nats.view_as(colours), logits.argmax(-1) == colours


# How well a run predicts the colours of corrupted patches of held-out images, beside counting the colours.


def counted_colours(data: ImageData, model: Encoder) -> np.ndarray:
    """Return the bits of each colour by its frequency in training images' patches, one added to every count."""
    patch, bits = sizes_of(model)
    counts = np.ones(2 ** (bits * data.shape[2]))
    for part in parts_of(min(len(data.train), LOOKED_AT), AT_ONCE):
        pixels = pixels_of(data.train, np.arange(part.start, part.stop))
        counts += np.bincount(colours_of(pixels, patch, bits).flatten().numpy(), minlength=len(counts))
    return -np.log2(counts / counts.sum())


def evaluate_colours(subject: LoadedRun, settings: EvaluationSettings, options: object, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out images, each always corrupted alike."""
    run, model, device = subject.run, subject.model, device_of(subject.model)
    held, count = held_out_images(run, settings)
    started_at = time.perf_counter()
    costs = torch.from_numpy(counted_colours(held.data, model)).to(device)

    def score(index: np.ndarray) -> tuple[Tensor, ...]:
        pixels = pixels_of(held.split, index)
        patches = model.input.length(pixels) - model.input.config.before
        batch = MppBatch(pixels, *corrupted_patches(patches, run.options.corrupted, index, 0, MASKS))
        batch = map_fields(batch, lambda field: field.to(device))
        colours = colours_of(batch.images, *sizes_of(model))
        return batch.corrupted, *nats_of(model, batch, colours), costs[colours]

    nats, accuracy, counted = means_of(count, quiet, score)
    bits = nats / log(2)
    measured = f"{BITS_PER_COLOUR.text(bits)}, {counted:.4f} by counting; {ACCURACY.text(accuracy)}"
    text = (f"{measured}: {plural(count, 'image')}, {run.options.corrupted:.0%} of each corrupted",)
    facts = {"counted_bits": counted, "measured_images": count, "corrupted": run.options.corrupted}
    metrics, baselines = {BITS_PER_COLOUR: bits, ACCURACY: accuracy}, {"counted": counted}
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="mpp", since=started_at)
