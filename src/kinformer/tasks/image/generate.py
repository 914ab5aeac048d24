"""Images drawn value by value, or completed from their first rows, and written as a PNG."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.head import Likelihood
from kinformer.core.model import StackedCausalModel, device_of
from kinformer.core.state import State
from kinformer.data.image_files import SUFFIXES, decode, read_head, write_png
from kinformer.generation.sampling import Sampling, TokenSampler, UniformStreams
from kinformer.generation.steps import Steps
from kinformer.runtime.errors import KinformerError, choose, require_finite
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.image.evaluate import data_of, labels_of
from kinformer.tasks.image.rows import LEVELS, START, Sequences, labelled
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.classes import classes_of
from kinformer.tasks.shared.pictures import png_of
from kinformer.tasks.shared.views import PixelInput, input_of

if TYPE_CHECKING:
    from kinformer.tasks.image import ImageGenerationOptions

PAUSE, OCCLUDED, SMALL = 1, 128, 84
"""Pixels between two images of a grid, the grey of what is occluded, and what height small images are enlarged to."""


@dataclass(frozen=True)
class Drawn:
    """Images that were drawn: ``pixels`` uint8 [images, height, width, channels]; ``facts`` for JSON, ``text`` for
    people."""

    pixels: np.ndarray
    facts: Mapping[str, object]
    text: str
    interrupted: bool = False


def draw(subject: LoadedRun, options: GenerationSettings, task_options: ImageGenerationOptions) -> Drawn:
    """Draw images with a run, in a grid of ``options.samples`` or, with ``task_options.complete``, a line for each that
    is completed: the part that stays, its completions, and the image itself."""
    run, model = subject.run, subject.model
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
        shown = [_veiled(originals, sequences, prefix.shape[1])[:, None], lines, originals[:, None]]
        write_png(out, grid(np.concatenate(shown, 1).reshape(-1, *pixels.shape[1:]), options.samples + 2))
    steps = values.shape[1] - (0 if prefix is None else prefix.shape[1])
    facts: dict[str, object] = {
        "run": str(run.folder), "out": str(out), "images": count, "drawn_values": values[:, -steps:].numel(),
        "seconds": seconds, "images_per_second": count / seconds, "state_bytes": state_bytes, "seed": options.seed,
    }  # fmt: skip
    if labels is not None:
        facts["labels"] = [classes_of(run)[label] for label in labels.tolist()]
    text = (
        f"{plural(count, 'image')} in {seconds:.2f} s, {count / seconds:.3g} images/s; state "
        f"{plural(state_bytes, 'byte')}; seed {options.seed}"
    )
    return Drawn(pixels, facts, text)


def grid(pixels: np.ndarray, columns: int) -> np.ndarray:
    """Return images [count, height, width, channels] side by side, ``columns`` in a line, with white between them; of
    small ones every pixel becomes a square."""
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
    """Refuse options of drawing that a head with a distribution of its own does not read."""
    if isinstance(model.head, Likelihood):
        for name in ("top_k", "top_p", "min_p"):
            if (value := getattr(options, name)) is not None:
                raise KinformerError(
                    f"`{name}` {value}: is for heads that give every value a probability; leave it "
                    "out, or give `temperature`."
                )


def _labels(run: TrainedRun, label: str | None, classes: Tensor | None, count: int) -> Tensor | None:
    """Return the classes int64 [count] of the images to draw: those that ``label`` names in turns, or ``classes``
    [images], or all in turns; None of a model that takes no classes."""
    input: PixelInput = input_of(run.config)
    if not input.classes:
        if label is not None:
            raise KinformerError(
                f"`label` {label}: this model draws images of no class; give a run that was trained `conditional`, or "
                "leave it out."
            )
        return None
    names = classes_of(run)
    if label is not None:
        chosen = [names.index(choose(name.strip(), names, f"`label` {label}: class")) for name in label.split(",")]
        classes = torch.tensor(chosen)
    elif classes is not None:
        return classes.repeat_interleave(count // len(classes))
    else:
        classes = torch.arange(len(names))
    return classes[torch.arange(count) % len(classes)]


def _occluded(
    subject: LoadedRun, sequences: Sequences, task_options: ImageGenerationOptions
) -> tuple[Tensor | None, np.ndarray | None, Tensor | None]:
    """Return the part that stays of the images to complete, int64 [images, time(, channels)], the images themselves,
    and their classes, where the model takes them."""
    if task_options.complete is None:
        return None, None, None
    input: PixelInput = input_of(subject.run.config)
    rows = input.height // 2 if task_options.rows is None else task_options.rows
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
    if Path(task_options.complete).suffix.lower() in SUFFIXES:
        originals = _picture(Path(task_options.complete).expanduser(), (input.height, input.width, input.channels))[
            None
        ]
        if input.classes and task_options.label is None:
            raise KinformerError(f"`complete` {task_options.complete}: a picture has no class; give `label` NAME too.")
        return sequences.of(originals)[:, :prefix], originals, None
    data = data_of(subject.run, task_options.complete)
    originals = np.asarray(data.test.pixels[: task_options.occluded])
    classes = None if task_options.label is not None else labels_of(subject.run, data, data.test.labels)
    return sequences.of(originals)[:, :prefix], originals, None if classes is None else classes[: len(originals)]


def _picture(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the picture ``path``, which must have the size of ``shape``."""
    head = read_head(path)
    if (head.height, head.width) != shape[:2]:
        raise KinformerError(
            f"`complete` {path}: has {head.width} x {head.height} pixels, but this model draws {shape[1]} x "
            f"{shape[0]}; scale the picture first."
        )
    return decode(path, shape)


def _veiled(originals: np.ndarray, sequences: Sequences, prefix: int) -> np.ndarray:
    """Return the images ``originals``, grey after the first ``prefix`` positions."""
    values = sequences.of(originals)
    values[:, prefix:] = OCCLUDED
    return sequences.images(values)


def sample(
    model: StackedCausalModel,
    sequences: Sequences,
    state: State,
    options: GenerationSettings,
    begin: Tensor | None = None,
    labels: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Draw values int64 [count, time(, channels)] that continue ``begin``, of the classes ``labels`` [count]; return
    them and the bytes of the state at the end. ``state`` is that of ``count`` new sequences."""
    count = len(state.seen)
    device, positions, input = device_of(model), len(sequences.order), sequences.input
    pick = _Picker(model, count, options)
    values = torch.full((count, positions + 1, *([input.channels] if input.joint else [])), START, device=device)
    done = 0 if begin is None else begin.shape[1]
    if begin is not None:
        values[:, 1 : 1 + done] = begin.to(device)
    with torch.inference_mode(), progressing(options.quiet, "drawing rows") as progress:
        state = states.reserve(state, positions)
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
    return values[:, 1:], states.nbytes(state)


class _Picker:
    """Draws the next value of every image, each from a stream of its own."""

    def __init__(self, model: StackedCausalModel, count: int, options: GenerationSettings) -> None:
        self.head = model.head if isinstance(model.head, Likelihood) else None
        self.temperature = options.temperature
        sampling = Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
        )
        self.sampler = TokenSampler(sampling, range(count))
        self.uniforms = UniformStreams(sampling.seed, range(count))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.head is None:
            return self.sampler(logits[:, :LEVELS])
        numbers = [self.uniforms.next(logits.device) for _ in range(self.head.draws)]
        return self.head.draw(logits, torch.cat(numbers, dim=-1), self.temperature)
