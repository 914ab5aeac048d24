"""The task of super-resolution: how a model fits, its rows, bits per dimension, and enlarged images.

A training row is an image and the smaller image of its blocks' means, here with `factor` 2 and one channel:

    image    10 20 30 40      source    25  35                     the encoder reads the small image
             30 40 30 40      inputs    START  10  20  ...  30     the decoder reads the large image
                              targets      10  20  30  ...  40     every value counts, the first too
"""

from __future__ import annotations

import time
from math import log
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.config import to_dict
from kinformer.core.model import SourceModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State
from kinformer.inputs.images import Pixels
from kinformer.lab.data.images import (
    ImageData,
    Images,
    decode,
    floors,
    read_head,
    reduced,
    write_png,
)
from kinformer.lab.tasks import image
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Made,
    TextTable,
    Write,
    input_of,
    part_of,
)
from kinformer.lab.tasks.images import files_in, open_images, png_of
from kinformer.lab.tasks.options import SuperResolutionGenerationOptions, SuperResolutionOptions
from kinformer.lab.tasks.task import GenerationSettings, Source, TrainingPlan
from kinformer.lab.tasks.texts import HeldOut
from kinformer.lab.training.logging import BITS_PER_DIM
from kinformer.runtime.errors import KinformerError, plural


def open_blocks(source: Source, options: SuperResolutionOptions, cache: Path | None = None) -> ImageData:
    """Return the images that ``source`` names, whose sides are multiples of the factor."""
    images = open_images(source, options, cache)
    height, width, _ = images.shape
    if height % options.factor or width % options.factor:
        raise KinformerError(
            f"`factor` {options.factor}: the images of {images.name} have {height} x {width} pixels, which are not "
            "whole blocks with this many cells on a side; choose a divisor of both."
        )
    return images


# How an encoder-decoder is fitted to images and to their smaller copies: the inputs of both its halves.


def enlarging_changes(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return the changes of ``config`` to a model that draws the images of ``data`` (None: not known yet). A model of
    text gets pixels in place of its tokens and positions, on both sides."""
    changes = image.image_changes(config, None if data is None else data.shape)
    if config.input.kind != image.INPUT and config.position.kind in image.ABSOLUTE:
        changes["position"] = "none"
    encoder = part_of(config, "encoder")
    if getattr(encoder.input, "kind", None) != image.INPUT:
        changes["encoder.input"] = {"kind": image.INPUT, "shifted": False, "channels": 3}
        if encoder.position.kind in image.ABSOLUTE:
            changes["encoder.position"] = "none"
    return changes


def requested(config: ModelConfig, data: ImageData | None, options: SuperResolutionOptions) -> dict[str, object]:
    """Return the changes of a fitted ``config`` to an encoder of the images of ``data``, made smaller by the factor."""
    if data is None:
        return {}
    encoder, factor, (height, width, channels) = part_of(config, "encoder"), options.factor, data.shape
    shape = (height // factor, width // factor, channels)
    return image.resized(to_dict(encoder.input), image.patterns_of(encoder.layers), shape, "encoder.")


def length(data: ImageData, config: ModelConfig) -> int:
    """Return how many positions a large image has."""
    for name, input in (("input", config.input), ("encoder.input", part_of(config, "encoder").input)):
        if getattr(input, "kind", None) != image.INPUT:
            raise KinformerError(
                f"`set` {name}={getattr(input, 'kind', None)}: the task super-resolution needs the input pixels; leave "
                "it out, or choose another task."
            )
    large: Pixels.Config = input_of(config)
    return large.raster.size


def check_enlarging(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model for images of other shapes, or whose attention runs through other cells than its inputs."""
    config, data, factor = plan.config, plan.data, plan.options.factor
    large: Pixels.Config = input_of(config)
    source: Pixels.Config = input_of(part_of(config, "encoder"))
    image.check(plan, nn.ModuleList([part_of(model, "stack")]))
    image.check_blocks_of(part_of(model, "encoder").stack, source)
    shape = (source.height * factor, source.width * factor, source.channels)
    if shape != data.shape or source.shifted:
        raise KinformerError(
            f"`set` encoder.input: is for images of {source.height} x {source.width} x {source.channels}, shifted "
            f"{str(source.shifted).lower()}, and not for images of {data.name} made {factor} times smaller; leave it "
            "out, it follows the data."
        )
    for name, input in (("input", large), ("encoder.input", source)):
        if input.classes:
            raise KinformerError(f"`set` {name}.classes={input.classes}: is for the task image; leave it out.")


# Pairs of a small and a large image, and the objective of drawing the large image.


class EnlargingBatch(NamedTuple):
    """``values`` int64 [images, time(, channels)] of large images, ``source`` [images, length(, channels)] of small."""

    values: Tensor
    source: Tensor

    @property
    def size(self) -> int:
        return len(self.values) * (self.values.shape[1] + self.source.shape[1])


class EnlargingSequences:
    """Large and small images as sequences, in the orders of the two inputs of ``config``, an encoder-decoder's."""

    def __init__(self, config: ModelConfig) -> None:
        large: Pixels.Config = input_of(config)
        small: Pixels.Config = input_of(part_of(config, "encoder"))
        self.large, self.small = image.Sequences(large), image.Sequences(small)
        self.factor = large.height // small.height

    def of(self, pixels: np.ndarray) -> EnlargingBatch:
        """Return the batch of images uint8 [images, height, width, channels], which are made smaller here."""
        return EnlargingBatch(self.large.of(pixels), self.small.of(reduced(pixels, self.factor)))


class EnlargingRows(image.ImageRows):
    """Images in a new order in every epoch; the same first ones in every validation."""

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__(plan)
        self.both = EnlargingSequences(plan.config)

    def _of(self, images: Images, chosen: np.ndarray) -> EnlargingBatch:
        return self.both.of(images.pixels[chosen])

    def baselines(self) -> dict[str, float]:
        train, held_out = self.data.train.pixels[: image.COUNTED], self.data.validation.pixels[: self.examples]
        return {"source": floors(train, held_out, self.both.factor)["source"]}


class EnlargingLoss(image.PixelLoss):
    """-ln p of every value of a large image, given the values before it and the small image."""

    def read(self, model: SourceModel, batch: EnlargingBatch) -> tuple[Tensor, State]:
        return model(image.shifted(batch.values), model.begin(batch.source))


# Bits per dimension of large images given small images, beside baselines of counting.


def evaluate(subject: LoadedRun, settings: EvaluationSettings, options: object, quiet: bool) -> Evaluation:
    """Evaluate a run on the images of a split, every value scored."""
    run, model, started_at = subject.run, subject.model, time.perf_counter()
    held = HeldOut.of(run, settings, image.data_of(run, settings.data))
    pixels, sequences = np.asarray(held.split.pixels[: settings.first]), EnlargingSequences(run.config)
    rows = max(1, settings.chunk // len(sequences.large.order))
    loss = EnlargingLoss(model)
    nats, _ = loss.measure(model, lambda part: sequences.of(pixels[part]), len(pixels), rows, quiet)
    value, training = nats / log(2) / pixels.size, held.data.train.pixels
    baselines = floors(training, pixels, sequences.factor)
    lines = [
        [run.member, f"{value:.4f}"],
        ["small image and three neighbours, counted", f"{baselines['source']:.4f}"],
        ["four neighbours, counted", f"{baselines['neighbours']:.4f}"],
    ]
    small, dimensions = sequences.small.input, pixels[0].size
    text = (
        f"{BITS_PER_DIM.text(value)}, over images of {small.height} x {small.width}; {plural(dimensions, 'value')} of "
        f"each of {plural(len(pixels), 'image')} scored\n",
        TextTable(("model", "bits per dimension"), lines, (1,)),
    )
    facts = {"images": len(pixels), "dimensions": dimensions, "source_size": [small.height, small.width]}
    facts |= {f"{name}_bits": bits for name, bits in baselines.items()}
    metrics, task = {BITS_PER_DIM: value}, "super-resolution"
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task=task, since=started_at)


# Images enlarged, value by value, and written as a PNG beside the small images.


def enlarge(subject: LoadedRun, prompt: None, options: GenerationSettings, write: Write = None) -> Made:
    """Enlarge pictures: a line for each, of the small one, ``options.samples`` drawn ones and any large one."""
    run, model = subject.run, subject.model
    task_options: SuperResolutionGenerationOptions = options.task_options
    out = png_of(run, task_options.out, "enlarged.png")
    image.check_sampling(model, options)
    sequences = EnlargingSequences(run.config)
    small, large = _pictures(subject, sequences, task_options)
    started_at, count = time.perf_counter(), options.samples
    source = sequences.small.of(small.repeat(count, 0)).to(device_of(model))
    with torch.inference_mode():
        state = model.begin(source)
    values, state_bytes = image.sample(model, sequences.large, state, options)
    pixels, seconds = sequences.large.images(values), time.perf_counter() - started_at
    shown = small.repeat(sequences.factor, 1).repeat(sequences.factor, 2)[:, None]
    lines = [shown, pixels.reshape(len(small), count, *pixels.shape[1:])]
    lines += [] if large is None else [large[:, None]]
    sheet = np.concatenate(lines, 1)
    write_png(out, image.grid(sheet.reshape(-1, *pixels.shape[1:]), sheet.shape[1]))
    facts = {"pictures": len(small), "source_size": list(small.shape[1:3]), "seconds": seconds}
    facts |= {"state_bytes": state_bytes, "seed": options.seed}
    return image.made_of(run, out, pixels, facts, f" of {plural(len(small), 'picture')}")


def _pictures(
    subject: LoadedRun, sequences: EnlargingSequences, options: SuperResolutionGenerationOptions
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the small pictures uint8 [count, height, width, channels], and the large pictures where all are known."""
    files = [] if options.image is None else files_in(Path(options.image).expanduser())
    if not files:
        large = np.asarray(image.data_of(subject.run, options.image).test.pixels[: options.enlarged])
        return reduced(large, sequences.factor), large
    small, large_input = sequences.small.input, sequences.large.input
    shape = (small.height, small.width, small.channels)
    smalls, pictures = [], []
    for file in files:
        head = read_head(file)
        if (head.height, head.width) == shape[:2]:
            smalls.append(decode(file, shape))
            continue
        picture = decode(file, (large_input.height, large_input.width, large_input.channels))
        pictures.append(picture)
        smalls.append(reduced(picture[None], sequences.factor)[0])
    return np.stack(smalls), np.stack(pictures) if len(pictures) == len(files) else None
