"""The task of drawing images value by value: how a model fits, its rows, bits per dimension, and drawing.

A training row is an image in the raster order of the model's input, here 2 x 2 pixels of one channel:

    image    10 20      inputs    START  10  20  30
             30 40      targets    10    20  30  40      every value counts, the first too

With `conditional`, the class of the image stands beside the values of every position of the inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, isfinite, log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import to_dict
from kinformer.core.model import CausalModel, StackedCausalModel, device_of
from kinformer.core.parts import Likelihood, PatternConfig
from kinformer.core.pattern import Pattern, Raster
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State, nbytes, reserve
from kinformer.generation.sampling import Sampling, TokenSampler, UniformStreams
from kinformer.generation.session import Steps
from kinformer.inputs.images import Pixels
from kinformer.lab.data.images import SUFFIXES, ImageData, Images, decode, floors, read_head, read_images, write_png
from kinformer.lab.data.sampling import in_epochs
from kinformer.lab.tasks.answers import classes_of, numbers_of
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Made,
    TextTable,
    TrainedRun,
    Write,
    input_of,
    parts_of,
)
from kinformer.lab.tasks.images import png_of
from kinformer.lab.tasks.options import ImageEvaluationOptions, ImageGenerationOptions, ImageOptions
from kinformer.lab.tasks.task import GenerationSettings, TrainingPlan
from kinformer.lab.tasks.texts import HeldOut, spec_of
from kinformer.lab.training.data_module import Batch, DataModule, ObjectiveOutput, map_fields
from kinformer.lab.training.logging import BITS_PER_DIM, Metric
from kinformer.runtime.errors import KinformerError, choose, plural, require_finite
from kinformer.runtime.progress import progressing

# How a model's config is fitted to the sizes of images: its input, and patterns that know rows and columns.

INPUT = "pixels"
ABSOLUTE = ("learned", "sinusoidal")
"""Positions of sequences, which the input's rows, columns and channels stand in for."""
_BLOCKS = ("block_height", "block_width")


def image_changes(config: ModelConfig, shape: tuple[int, int, int] | None) -> dict[str, object]:
    """Return the changes of ``config`` to a model of images of ``shape`` (height, width, channels; None: not known)."""
    patterns = patterns_of(config.layers)
    if config.input.kind == INPUT:
        input_changes = to_dict(config.input)
    else:
        input_changes = {"kind": INPUT, "scale": getattr(config.input, "scale", False), "channels": 3}
        if patterns and shape is not None:
            input_changes |= {name: getattr(next(iter(patterns.values())), name) for name in _BLOCKS}
    return {"input": input_changes} if shape is None else resized(input_changes, patterns, shape)


def patterns_of(layers: Sequence[object]) -> dict[int, PatternConfig]:
    """Return the attention patterns in blocks of an image that ``layers`` (configs) have, by the layers' numbers."""
    mixers = ((index, getattr(layer, "mixer", None)) for index, layer in enumerate(layers))
    patterns: dict[int, Any] = {index: getattr(mixer, "pattern", None) for index, mixer in mixers}
    sizes = ("height", "width", *_BLOCKS)
    return {index: item for index, item in patterns.items() if all(hasattr(item, size) for size in sizes)}


def resized(
    input: dict[str, Any], patterns: Mapping[int, PatternConfig], shape: tuple[int, int, int], path: str = ""
) -> dict[str, object]:
    """Return the changes under ``path`` of a config of pixels, ``input``, and of the ``patterns`` of layers to images
    of ``shape`` (height, width, channels)."""
    height, width, channels = shape
    if channels == 1:
        input = {name: value for name, value in input.items() if name not in ("joint", "per_channel")}
    cells = {"height": height, "width": width * (1 if input.get("joint") else channels)}

    def blocks(part: Mapping[str, Any]) -> dict[str, Any]:
        return {f"block_{side}": divisor(size, part[f"block_{side}"]) for side, size in cells.items()}

    input = input | ({} if input.get("block_height") is None else blocks(input))
    changes = {f"{path}layers.{index}.mixer.pattern": to_dict(pattern) for index, pattern in patterns.items()}
    sizes = {"height": height, "width": width, "channels": channels}
    return {f"{path}input": input | sizes, **{name: part | cells | blocks(part) for name, part in changes.items()}}


def divisor(size: int, limit: int) -> int:
    """Return the greatest divisor of ``size`` up to ``limit``."""
    return next(number for number in range(min(size, limit), 0, -1) if size % number == 0)


def fit(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return the changes of ``config`` to a model that draws the images of ``data``. A model of text gets pixels in
    place of its tokens and positions."""
    position = {"position": "none"} if config.input.kind != INPUT and config.position.kind in ABSOLUTE else {}
    return image_changes(config, None if data is None else data.shape) | position


def requested(config: ModelConfig, data: ImageData | None, options: ImageOptions) -> dict[str, object]:
    """Return the changes of ``config`` that ``options`` ask for: an input that gets the class of every image, with
    ``conditional``; refuse data without classes."""
    if not options.conditional or data is None:
        return {}
    if len(data.classes) < 2:
        has = "has one class" if data.classes else "does not have classes"
        raise KinformerError(
            f"`conditional`: {data.name} {has}; give images with labels of two or more classes, such as a folder with "
            "a folder per class, or leave it out."
        )
    return {"input.classes": len(data.classes)}


def values_of(data: ImageData) -> int:
    """Return how many values a channel of a pixel can have."""
    return LEVELS


def length(data: ImageData, config: ModelConfig) -> int:
    """Return how many positions an image has."""
    raster: Raster | None = getattr(config.input, "raster", None)
    if raster is None:
        raise KinformerError(
            f"`set` input={config.input.kind}: the task image needs the input pixels; leave it out, or choose "
            "another task."
        )
    return raster.size


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model for images of another shape, or whose attention runs through other cells than its input."""
    data: ImageData = plan.data
    input: Pixels.Config = input_of(plan.config)
    shape = (input.height, input.width, input.channels)
    if not input.shifted:
        raise KinformerError(
            "`set` input.shifted=false: a position would hold the very value that it predicts; leave it out."
        )
    if shape != data.shape:
        raise KinformerError(
            f"`set` input: is for images of {' x '.join(map(str, shape))}, but {data.name} has "
            f"{' x '.join(map(str, data.shape))}; leave the sizes out, they follow the data."
        )
    if input.classes not in (0, len(data.classes)):
        raise KinformerError(
            f"`set` input.classes={input.classes}: but {data.name} has {plural(len(data.classes), 'class')}; leave it "
            "out, and give `conditional`."
        )
    check_blocks_of(model, input)


def check_blocks_of(model: nn.Module, input: Pixels.Config) -> None:
    """Refuse a model whose attention runs through other cells than its ``input`` (a config of pixels)."""
    for module in model.modules():
        pattern = getattr(module, "pattern", None)
        raster = getattr(pattern, "raster", None) if isinstance(pattern, Pattern) else None
        if raster is not None and raster != input.raster:
            raise KinformerError(
                f"the pattern of attention has blocks of {raster.block_height} x {raster.block_width} cells of "
                f"{raster.height} x {raster.width}, but the input {input.raster.block_height} x "
                f"{input.raster.block_width} of {input.raster.height} x {input.raster.width}; give both the same "
                "block_height and block_width."
            )


# Images as sequences for a causal model, and the objective of their values.

LEVELS, START = 256, 256


class ImageBatch(NamedTuple):
    """``values`` int64 [images, time], or [images, time, channels] where a position is a pixel; ``labels`` int64
    [images], the classes of the images, where the model is told them."""

    values: Tensor
    labels: Tensor | None = None

    @property
    def size(self) -> int:
        return self.values.shape[0] * self.values.shape[1]


class Sequences:
    """Images as sequences in the order of a model's input, a config of pixels."""

    def __init__(self, input: Pixels.Config) -> None:
        self.input = input
        self.order = input.raster.order()
        self._places = np.argsort(self.order)

    def of(self, pixels: np.ndarray) -> Tensor:
        """Return ``pixels`` uint8 [images, height, width, channels] as values int64 [images, time(, channels)]."""
        cells = pixels.reshape(len(pixels), len(self.order), -1)[:, self.order]
        return torch.from_numpy((cells if self.input.joint else cells[..., 0]).astype(np.int64))

    def images(self, values: Tensor) -> np.ndarray:
        """Return ``values`` [images, time(, channels)] as pixels uint8, the inverse of :meth:`of`."""
        shape = (len(values), self.input.height, self.input.width, self.input.channels)
        return values.cpu().numpy().astype(np.uint8)[:, self._places].reshape(shape)

    def prefix(self, rows: int) -> int | None:
        """Return how many positions hold the first ``rows`` rows, None where these do not begin the sequence."""
        raster = self.input.raster
        return None if rows % raster.block_height and raster.block_width < raster.width else rows * raster.width


COUNTED = 4000
"""The number of training images that simple rules count before a training."""


class ImageRows(DataModule):
    """Images in a new order in every epoch; the same first ones in every validation, of about the settings' tokens."""

    metrics = (BITS_PER_DIM,)

    def __init__(self, plan: TrainingPlan) -> None:
        data, settings, input = plan.data, plan.settings, input_of(plan.config)
        self.data, self.settings, self.sequences = data, settings, Sequences(input)
        count = max(1, settings.validation_tokens // input.raster.size)
        self.examples = max(min(settings.batch_size, len(data.validation)), min(count, len(data.validation)))

    @property
    def validations(self) -> int:
        return max(1, self.examples // self.settings.batch_size)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        numbers = self._numbers(step, rank, world)
        return self._of(self.data.train, in_epochs(numbers, len(self.data.train), self.settings.seed))

    def _numbers(self, step: int, rank: int, world: int) -> np.ndarray:
        share = self.settings.batch_size // world
        return np.arange(share) + step * self.settings.batch_size + rank * share

    def _of(self, images: Images, chosen: np.ndarray) -> Batch:
        values = self.sequences.of(images.pixels[chosen])
        if not self.sequences.input.classes:
            return ImageBatch(values)
        assert images.labels is not None
        return ImageBatch(values, torch.from_numpy(images.labels[chosen].astype(np.int64)))

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        images = self.data.validation
        for part in range(self.validations):
            yield self._of(images, self._numbers(part, rank, world) % len(images))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_DIM.name: means["nats"] / log(2)}

    def baselines(self) -> dict[str, float]:
        return floors(self.data.train.pixels[:COUNTED], self.data.validation.pixels[: self.examples])


class PixelLoss:
    """-ln p of every value given the values before it; the first value follows START."""

    def __init__(self, model: StackedCausalModel) -> None:
        self.nats = nats_of(model)

    @classmethod
    def of(cls, model: StackedCausalModel, data: DataModule | None) -> PixelLoss:
        """Make the objective for the head of ``model``."""
        return cls(model)

    def __call__(self, model: CausalModel, batch: Any, state: State, progress: float) -> ObjectiveOutput:
        logits, state = self.read(model, batch)
        nats, count = self.nats(logits, batch.values).sum(), batch.values.numel()
        return nats / count, {"nats": nats.detach(), "predicted": torch.full_like(nats.detach(), count)}, state

    def read(self, model: Any, batch: Any) -> tuple[Tensor, State]:
        """Return the logits of the values of ``batch``, and the state after them."""
        return model(labelled(shifted(batch.values), batch.labels))

    def measure(
        self, model: Any, batch_of: Callable[[slice], Batch], count: int, rows: int, quiet: bool
    ) -> tuple[float, float]:
        """Return the nats of all values of ``count`` images, and of the values at the first position, ``rows`` images
        at a time; ``batch_of`` returns the batch of a slice of the images."""
        total, first = 0.0, 0.0
        with torch.inference_mode():
            for part in parts_of(count, rows, quiet):
                batch: Any = map_fields(batch_of(part), lambda field: field.to(device_of(model)))
                nats = self.nats(self.read(model, batch)[0], batch.values).double()
                total, first = total + float(nats.sum()), first + float(nats[:, 0].sum())
        require_finite(isfinite(total))
        return total, first


def shifted(values: Tensor) -> Tensor:
    """Return the inputs of a model to predict ``values`` [images, time, ...]: START, and all values but the last."""
    return torch.cat([torch.full_like(values[:, :1], START), values[:, :-1]], dim=1)


def labelled(values: Tensor, labels: Tensor | None) -> Tensor:
    """Return ``values`` [images, time(, channels)] with the class of each image, ``labels`` int64 [images], behind the
    values of every position, [images, time, values + 1]; unchanged without labels."""
    if labels is None:
        return values
    values = values if values.dim() == 3 else values[..., None]
    return torch.cat([values, labels[:, None, None].to(values.device).expand(*values.shape[:2], 1)], -1)


def nats_of(model: StackedCausalModel) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how the head of ``model`` scores values: (logits, values) -> nats of every position, [images, time]."""
    return model.head.nats if isinstance(model.head, Likelihood) else class_nats


def class_nats(logits: Tensor, values: Tensor) -> Tensor:
    """Return -ln softmax(logits)[value], of logits [images, time, 256]."""
    return functional.cross_entropy(logits.float().flatten(0, 1), values.flatten(), reduction="none").view_as(values)


# Bits per dimension of a run, beside baselines of counting in the same images.

WITHOUT_FIRST = Metric("bits_per_dim_without_first", "bits per dimension without the first value of an image")


def data_of(run: TrainedRun, data: str | None) -> ImageData:
    """Return the images that ``data`` names, or the run's own; refuse images of another shape than the model's."""
    spec = spec_of(run, data)
    images = read_images(spec, holdout=run.data.get("holdout"), size=run.options.resize)
    input: Pixels.Config = input_of(run.config)
    if images.shape != (shape := (input.height, input.width, input.channels)):
        raise KinformerError(
            f"`data` {spec}: has images of {' x '.join(map(str, images.shape))}, but this model draws "
            f"{' x '.join(map(str, shape))}; give images of that shape."
        )
    return images


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: ImageEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on the images of a split, every value scored unless the options say otherwise."""
    run, model, started_at = subject.run, subject.model, time.perf_counter()
    held = HeldOut.of(run, settings, data_of(run, settings.data))
    pixels = held.split.pixels[: settings.first]
    sequences, labels = Sequences(input_of(run.config)), labels_of(run, held.data, held.split.labels)

    def batch_of(part: slice) -> ImageBatch:
        return ImageBatch(sequences.of(pixels[part]), None if labels is None else labels[part])

    rows = max(1, settings.chunk // len(sequences.order))
    nats, first = PixelLoss(model).measure(model, batch_of, len(pixels), rows, quiet)
    per_image = pixels[0].size
    unscored = sequences.input.channels if sequences.input.joint else 1
    every = nats / log(2) / pixels.size
    rest = (nats - first) / log(2) / (len(pixels) * (per_image - unscored))
    main = WITHOUT_FIRST if options.without_first else BITS_PER_DIM
    value = rest if options.without_first else every
    baselines, scored = floors(held.data.train.pixels, pixels), per_image - unscored * options.without_first
    facts: dict[str, object] = {"images": len(pixels), "dimensions": per_image, "scored": scored}
    facts |= {f"{name}_bits": bits for name, bits in baselines.items()}
    lines = [
        [run.member, f"{value:.4f}"],
        ["four neighbours, counted", f"{baselines['neighbours']:.4f}"],
        ["histogram of every place", f"{baselines['histogram']:.4f}"],
    ]
    text = (
        f"{main.text(value)}; {scored} of {plural(per_image, 'value')} of each of {plural(len(pixels), 'image')} "
        f"scored{', the class being told' if labels is not None else ''}\n",
        TextTable(("model", "bits per dimension"), lines, (1,)),
    )
    return held.report(subject, {main: value}, text, facts=facts, baselines=baselines, task="image", since=started_at)


def labels_of(run: TrainedRun, data: ImageData, labels: np.ndarray | None) -> Tensor | None:
    """Return the classes int64 [images] of images, as ``run`` numbers them; ``labels`` are the classes as ``data``
    numbers them. None for a model without classes."""
    input: Pixels.Config = input_of(run.config)
    if not input.classes:
        return None
    if labels is None:
        raise KinformerError(
            f"{data.name}: does not have classes, but {run.folder} draws images of a class; give images with labels."
        )
    return torch.from_numpy(numbers_of(run, data.name, data.classes)[labels])


# Images drawn value by value, or completed from their first rows, and written as a PNG.

PAUSE, OCCLUDED, SMALL = 1, 128, 84
"""Pixels between two images of a grid, the grey of occluded parts, and the height that small images are enlarged to."""


def draw(subject: LoadedRun, prompt: None, options: GenerationSettings, write: Write = None) -> Made:
    """Draw images with a run, in a grid of ``options.samples`` or, with `complete`, a line for each completed image:
    the part that stays, its completions, and the image itself."""
    run, model = subject.run, subject.model
    task_options: ImageGenerationOptions = options.task_options
    out = png_of(run, task_options.out, "samples.png")
    check_sampling(model, options)
    sequences = Sequences(input_of(run.config))
    prefix, originals, classes = _occluded(subject, sequences, task_options)
    count = options.samples * (1 if prefix is None else len(prefix))
    labels = _labels(run, task_options.label, classes, count)
    begin = None if prefix is None else prefix.repeat_interleave(options.samples, 0)
    started_at = time.perf_counter()
    values, state_bytes = sample(model, sequences, model.initial_state(count), options, begin, labels)
    seconds = time.perf_counter() - started_at
    pixels = sequences.images(values)
    if originals is None or prefix is None:
        write_png(out, grid(pixels, ceil(sqrt(count))))
    else:
        lines = pixels.reshape(len(originals), options.samples, *pixels.shape[1:])
        veiled = sequences.of(originals)
        veiled[:, prefix.shape[1] :] = OCCLUDED  # grey after the part that stays
        shown = [sequences.images(veiled)[:, None], lines, originals[:, None]]
        write_png(out, grid(np.concatenate(shown, 1).reshape(-1, *pixels.shape[1:]), options.samples + 2))
    steps = values.shape[1] - (0 if prefix is None else prefix.shape[1])
    facts: dict[str, Any] = {"drawn_values": values[:, -steps:].numel(), "seconds": seconds, "state_bytes": state_bytes}
    facts |= {} if labels is None else {"labels": [classes_of(run)[label] for label in labels.tolist()]}
    return made_of(run, out, pixels, facts | {"seed": options.seed})


def made_of(run: TrainedRun, out: Path, pixels: np.ndarray, facts: Mapping[str, Any], of: str = "") -> Made:
    """Return the result of generating images with these ``pixels``, made ``of`` others, in words; ``facts`` hold the
    seconds, the bytes of the state, the seed and others."""
    count, seconds = len(pixels), facts["seconds"]
    head = {"run": str(run.folder), "out": str(out), "images": count}
    text = f"{plural(count, 'image')}{of} in {seconds:.2f} s, {count / seconds:.3g} images/s; "
    text += f"state {plural(facts['state_bytes'], 'byte')}; seed {facts['seed']}"
    return Made({**head, **facts, "images_per_second": count / seconds}, text, pixels=pixels)


def grid(pixels: np.ndarray, columns: int) -> np.ndarray:
    """Return images [count, height, width, channels] in lines of ``columns`` on white, small ones enlarged."""
    times = max(1, SMALL // pixels.shape[1])
    pixels = pixels.repeat(times, axis=1).repeat(times, axis=2)
    count, height, width, channels = pixels.shape
    lines = ceil(count / columns)
    sheet = np.full((lines * (height + PAUSE) + PAUSE, columns * (width + PAUSE) + PAUSE, channels), 255, np.uint8)
    for index, image in enumerate(pixels):
        top, left = (
            PAUSE + n * (side + PAUSE) for n, side in zip(divmod(index, columns), (height, width), strict=True)
        )
        sheet[top : top + height, left : left + width] = image
    return sheet


def check_sampling(model: StackedCausalModel, options: GenerationSettings) -> None:
    """Refuse options of drawing that a head with another distribution does not read."""
    if isinstance(model.head, Likelihood):
        for name in ("top_k", "top_p", "min_p"):
            if (value := getattr(options, name)) is not None:
                raise KinformerError(
                    f"`{name}` {value}: is for heads that give every value a probability; leave it "
                    "out, or give `temperature`."
                )


def _labels(run: TrainedRun, label: str | None, classes: Tensor | None, count: int) -> Tensor | None:
    """Return the classes int64 [count] of the images to draw: the classes that ``label`` names in turns, or ``classes``
    [images], or all classes in turns; None for a model without classes."""
    input: Pixels.Config = input_of(run.config)
    if not input.classes:
        if label is not None:
            raise KinformerError(
                f"`label` {label}: this model draws images of no class; give a run that was trained `conditional`, or "
                "leave it out."
            )
        return None
    names = classes_of(run)
    if label is None and classes is not None:
        return classes.repeat_interleave(count // len(classes))
    chosen = names if label is None else [name.strip() for name in label.split(",")]
    numbers = [names.index(choose(name, names, f"`label` {label}: class")) for name in chosen]
    return torch.tensor(numbers)[torch.arange(count) % len(numbers)]


def _occluded(
    subject: LoadedRun, sequences: Sequences, options: ImageGenerationOptions
) -> tuple[Tensor | None, np.ndarray | None, Tensor | None]:
    """Return the part that stays of the images to complete, int64 [images, time(, channels)], the images themselves,
    and their classes, where the model takes them."""
    if options.complete is None:
        return None, None, None
    input: Pixels.Config = input_of(subject.run.config)
    rows = input.height // 2 if options.rows is None else options.rows
    if rows >= input.height:
        raise KinformerError(
            f"`rows` {rows}: nothing is left to complete of {plural(input.height, 'row')}; keep fewer."
        )
    prefix = sequences.prefix(rows)
    if prefix is None:
        raise KinformerError(
            f"`rows` {rows}: this model draws blocks of {plural(input.raster.block_height, 'row')}; keep a multiple "
            "of that."
        )
    if Path(options.complete).suffix.lower() in SUFFIXES:
        path = Path(options.complete).expanduser()
        head = read_head(path)
        if (head.height, head.width) != (input.height, input.width):
            raise KinformerError(
                f"`complete` {path}: has {head.width} x {head.height} pixels, but this model draws {input.width} x "
                f"{input.height}; scale the picture first."
            )
        originals = decode(path, (input.height, input.width, input.channels))[None]
        if input.classes and options.label is None:
            raise KinformerError(
                f"`complete` {options.complete}: a picture does not have a class; give `label` NAME too."
            )
        return sequences.of(originals)[:, :prefix], originals, None
    data = data_of(subject.run, options.complete)
    originals = np.asarray(data.test.pixels[: options.occluded])
    classes = None if options.label is not None else labels_of(subject.run, data, data.test.labels)
    return sequences.of(originals)[:, :prefix], originals, None if classes is None else classes[: len(originals)]


def sample(
    model: StackedCausalModel,
    sequences: Sequences,
    state: State,
    options: GenerationSettings,
    begin: Tensor | None = None,
    labels: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Draw values int64 [count, time(, channels)] that continue ``begin``, of the classes ``labels`` [count]; return
    them and the bytes of the state at the end. ``state`` is the state of ``count`` new sequences."""
    count = len(state.seen)
    device, positions, input = device_of(model), len(sequences.order), sequences.input
    pick = _Picker(model, count, options)
    values = torch.full((count, positions + 1, *([input.channels] if input.joint else [])), START, device=device)
    done = 0 if begin is None else begin.shape[1]
    if begin is not None:
        values[:, 1 : 1 + done] = begin.to(device)
    with torch.inference_mode(), progressing(options.quiet, "drawing rows") as progress:
        state = reserve(state, positions)
        for part in values[:, :done].split(options.chunk, 1) if done else ():
            state = model.head_inputs(labelled(part, labels), state)[1]
        stepping = Steps(model, positions - done, recorded=True)
        for step in range(done, positions):
            logits, state = stepping.step(labelled(values[:, step : step + 1], labels), state)
            values[:, step + 1] = pick(logits)
            if progress is not None and (step + 1) % input.raster.width == 0:
                progress((step + 1) // input.raster.width, input.height)
        require_finite(bool(logits.isfinite().all()))
        state = stepping.settled(state)
    return values[:, 1:], nbytes(state)


class _Picker:
    """Draws the next value of every image, each from another random stream."""

    def __init__(self, model: StackedCausalModel, count: int, options: GenerationSettings) -> None:
        self.head = model.head if isinstance(model.head, Likelihood) else None
        self.temperature = options.temperature
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        sampling = Sampling(**{name: getattr(options, name) for name in names})
        self.sampler = TokenSampler(sampling, range(count))
        self.uniforms = UniformStreams(sampling.seed, range(count))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.head is None:
            return self.sampler(logits[:, :LEVELS])
        numbers = [self.uniforms.next(logits.device) for _ in range(self.head.draws)]
        return self.head.draw(logits, torch.cat(numbers, dim=-1), self.temperature)
