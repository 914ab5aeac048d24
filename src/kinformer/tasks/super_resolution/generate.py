"""Images enlarged, value by value, and written as a PNG beside what they were made of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kinformer.core.model import device_of
from kinformer.data.image_files import decode, read_head, write_png
from kinformer.data.image_floors import reduced
from kinformer.runtime.words import plural
from kinformer.tasks.image.evaluate import data_of
from kinformer.tasks.image.generate import Drawn, check_sampling, grid, sample
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.pictures import files_in, png_of
from kinformer.tasks.super_resolution.rows import EnlargingSequences

if TYPE_CHECKING:
    from kinformer.tasks.super_resolution import SuperResolutionGenerationOptions


def enlarge(subject: LoadedRun, options: GenerationSettings, task_options: SuperResolutionGenerationOptions) -> Drawn:
    """Enlarge pictures: a line for each, of the small one, ``options.samples`` drawn ones and, where it is known, the
    image itself."""
    run, model = subject.run, subject.model
    out = png_of(run, task_options.out, "enlarged.png")
    check_sampling(model, options)
    sequences = EnlargingSequences(run.config)
    small, large = _pictures(subject, sequences, task_options)
    started_at, count = time.perf_counter(), options.samples
    source = sequences.small.of(small.repeat(count, 0)).to(device_of(model))
    with torch.inference_mode():
        state = model.begin(source)
    values, state_bytes = sample(model, sequences.large, state, options)
    pixels, seconds = sequences.large.images(values), time.perf_counter() - started_at
    shown = small.repeat(sequences.factor, 1).repeat(sequences.factor, 2)[:, None]
    lines = [shown, pixels.reshape(len(small), count, *pixels.shape[1:])]
    lines += [] if large is None else [large[:, None]]
    sheet = np.concatenate(lines, 1)
    write_png(out, grid(sheet.reshape(-1, *pixels.shape[1:]), sheet.shape[1]))
    facts = {
        "run": str(run.folder), "out": str(out), "images": len(pixels), "pictures": len(small),
        "source_size": list(small.shape[1:3]), "seconds": seconds, "images_per_second": len(pixels) / seconds,
        "state_bytes": state_bytes, "seed": options.seed,
    }  # fmt: skip
    text = (
        f"{plural(len(pixels), 'image')} of {plural(len(small), 'picture')} in {seconds:.2f} s, "
        f"{len(pixels) / seconds:.3g} images/s; state {plural(state_bytes, 'byte')}; seed {options.seed}"
    )
    return Drawn(pixels, facts, text)


def _pictures(
    subject: LoadedRun, sequences: EnlargingSequences, task_options: SuperResolutionGenerationOptions
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the small pictures uint8 [count, height, width, channels], and the large ones where all of them are
    known."""
    files = [] if task_options.image is None else files_in(Path(task_options.image).expanduser())
    if not files:
        large = np.asarray(data_of(subject.run, task_options.image).test.pixels[: task_options.enlarged])
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
