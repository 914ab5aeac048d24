"""Pictures to predict from and to make vectors of: files, those of a folder, or the test images of data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import WholeModel, device_of
from kinformer.data.image_files import SUFFIXES, decode, read_head
from kinformer.data.images import read_images
from kinformer.data.items import STDIN, Inputs
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import Embedded, EmbeddingSettings, FileSource, ItemSettings
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.arriving import batched
from kinformer.tasks.shared.embedding import pooled
from kinformer.tasks.shared.text import spec_of
from kinformer.tasks.shared.views import PatchInput, input_of


class Picture(NamedTuple):
    """``pixels`` uint8 [height, width, channels]; ``label`` where the data say which class it is of."""

    name: str
    pixels: np.ndarray
    label: str | None = None


def pictures_in(run: TrainedRun, source: FileSource, limit: int | None, classes: Sequence[str] = ()) -> Inputs[Picture]:
    """Return the pictures of ``source`` at the size of the model of ``run``, at most ``limit``: a picture, all in a
    folder and its folders, the test images of data, or a list of paths. A folder named as one of ``classes`` labels its
    own.

    The heads of all files are looked at before the first is decoded.
    """
    if source == STDIN:
        raise KinformerError("-: images are not read from standard input; give a picture, a folder of them, or data.")
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        with reading(path):
            inside = sorted(path.rglob("*")) if path.is_dir() else [path] if path.suffix.lower() in SUFFIXES else None
        if inside is None:
            return Inputs(pictures(run, str(source), sys.maxsize if limit is None else limit), limit)
        files = [file for file in inside if file.suffix.lower() in SUFFIXES and not file.is_dir()]
    else:
        files = [Path(file) for file in source]
    files = files[:limit]
    if not files:
        raise KinformerError(f"{source}: holds no pictures; give a PNG or JPEG, a folder of them, or data.")
    for file in files:
        read_head(file)
    input: PatchInput = input_of(run.config)
    shape = (*input.size, input.channels)
    labels = (file.parent.name if file.parent.name in classes else None for file in files)
    items = (Picture(str(file), decode(file, shape), label) for file, label in zip(files, labels, strict=True))
    return Inputs(items, len(files))


def laid(batch: Sequence[Picture], model: WholeModel) -> Tensor:
    """Return uint8 [images, channels, height, width] of pictures of one size, on the device of ``model``."""
    pixels = np.stack([picture.pixels for picture in batch]).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(pixels)).to(device_of(model))


def pictures(run: TrainedRun, spec: str, count: int) -> Iterator[Picture]:
    """Yield a PNG or JPEG, or those that stand in a folder, scaled and cropped to the size that the model of ``run``
    was made for; or the first ``count`` test images of the data ``spec``.

    Errors: ``KinformerError`` for what is missing or damaged, and for images of other channels than the model's.
    """
    input: PatchInput = input_of(run.config)
    shape = (*input.size, input.channels)
    path = Path(spec).expanduser()
    if files := files_in(path):
        if count > 1:
            raise KinformerError(
                f"`samples` {count}: says how many test images of data are taken, but all pictures of {spec} are; "
                "leave it out."
            )
        for file in files:
            read_head(file)
            yield Picture(str(file), decode(file, shape))
        return
    images = read_images(spec_of(run, spec), holdout=run.data.get("holdout"), size=run.options.resize)
    test = images.test
    if test.shape[2] != input.channels:
        raise KinformerError(
            f"{images.name}: its images have {plural(test.shape[2], 'channel')}, but {run.folder} reads "
            f"{input.channels}; give others."
        )
    for index in range(min(count, len(test))):
        label = None if test.labels is None else test.classes[int(test.labels[index])]
        yield Picture(f"test image {index + 1} of {images.name}", np.asarray(test.pixels[index]), label)


def png_of(run: TrainedRun, out: str | None, usual: str) -> Path:
    """Return the PNG to write: ``out``, or ``usual`` in the folder of ``run``."""
    path = Path(out) if out is not None else run.folder / usual
    if path.suffix.lower() != ".png":
        raise KinformerError(f"`out` {path}: is no name of a PNG; end it with .png.")
    return path


def files_in(path: Path) -> list[Path]:
    """Return the picture ``path``, or the pictures of a folder that holds no folders; an empty list for other data."""
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        require_file(path)
        return [path]
    with reading(path):
        inside = sorted(path.iterdir()) if path.is_dir() else []
    if any(item.is_dir() for item in inside):
        return []
    return [item for item in inside if item.suffix.lower() in SUFFIXES]


def picture_batches(taken: Inputs[Picture], settings: ItemSettings, doing: str) -> Iterator[list[Picture]]:
    """Yield the pictures ``taken`` in batches; a bar says what the caller is ``doing``."""
    done = 0
    with progressing(settings.quiet or taken.total is None, doing) as progress:
        for batch in batched(taken.items, settings.batch_size):
            yield batch
            done += len(batch)
            if progress is not None and taken.total is not None:
                progress(done, taken.total)


def embed_pictures(subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the vectors of the pictures of ``source``, in order: the last hidden states of an encoder, pooled."""
    model: WholeModel = subject.model
    for batch in picture_batches(pictures_in(subject.run, source, settings.max_items), settings, "embedding"):
        with torch.inference_mode():
            states = model.hidden(laid(batch, model)).long_input
            vectors = pooled(states, states.new_ones(states.shape[:2], dtype=torch.bool), settings.pooling)
        for picture, vector in zip(batch, vectors.numpy(), strict=True):
            yield Embedded("image", picture.name, vector)
