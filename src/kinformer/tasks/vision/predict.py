"""The most probable classes of pictures: of a file, of those in a folder, or of test images."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import device_of
from kinformer.data.image_files import SUFFIXES, decode, read_head
from kinformer.data.images import read_images
from kinformer.data.items import STDIN, Inputs
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.arriving import batched
from kinformer.tasks.shared.classes import classes_of, most_probable, spell_classes
from kinformer.tasks.shared.made import Made
from kinformer.tasks.shared.text import spec_of
from kinformer.tasks.vision.evaluate import AT_ONCE
from kinformer.tasks.vision.options import VisionGenerationOptions

"""The temperature that leaves probabilities as they are."""


class Picture(NamedTuple):
    """``pixels`` uint8 [height, width, channels]; ``label`` where the data say which class it is of."""

    name: str
    pixels: np.ndarray
    label: str | None = None


def classify(
    subject: LoadedRun, options: Any, task_options: VisionGenerationOptions, write: Callable[[str], None] | None
) -> Made:
    """The ``own.classes`` most probable classes of each image; a line for each is given to ``write`` as it is found."""
    run, model, _, _ = subject
    if task_options.image is None:
        raise KinformerError("there must be an image to classify; give `image` FILE, a folder, or data such as digits.")
    names = classes_of(run)
    predictions: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for batch in batched(pictures(run, task_options.image, options.samples), AT_ONCE):
        for picture, probabilities in zip(batch, probabilities_of(model, batch), strict=True):
            classes = most_probable(probabilities, names, task_options.classes)
            if write is not None:
                write(("\n" if predictions else "") + _line(picture, classes))
            predictions.append({"image": picture.name, "label": picture.label, "classes": classes})
    seconds = time.perf_counter() - begun
    facts = {"run": str(run.folder), "images": predictions, "seconds": seconds}
    return Made(
        facts, f"{plural(len(predictions), 'image')} in {seconds:.3f} s, {len(predictions) / seconds:.3g} images/s"
    )


def predict(subject: LoadedRun, source: Any, settings: PredictionSettings) -> Iterator[Predicted]:
    """The most probable classes of the images of ``source``, in order: a picture, all in a folder and its folders, the
    test images of data, or a list of pictures' paths."""
    names, taken = classes_of(subject.run), _pictures_in(subject.run, source, settings.max_items)
    done = 0
    with progressing(settings.quiet or taken.total is None, "predicting") as progress:
        for batch in batched(taken.items, settings.batch_size):
            for picture, probabilities in zip(batch, probabilities_of(subject.model, batch), strict=True):
                classes = most_probable(probabilities, names, settings.top_k)
                label = {} if picture.label is None else {"label": picture.label}
                yield Predicted({"image": picture.name} | label | {"classes": classes}, _line(picture, classes))
            done += len(batch)
            if progress is not None and taken.total is not None:
                progress(done, taken.total)


def _pictures_in(run: TrainedRun, source: Any, most: int | None) -> Inputs:
    """The pictures to predict; the heads of all files are looked at before the first is computed."""
    if source == STDIN:
        raise KinformerError("-: images are not read from standard input; give a picture, a folder of them, or data.")
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        with reading(path):
            inside = sorted(path.rglob("*")) if path.is_dir() else [path] if path.suffix.lower() in SUFFIXES else None
        if inside is None:
            return Inputs(pictures(run, str(source), sys.maxsize if most is None else most), most)
        files = [file for file in inside if file.suffix.lower() in SUFFIXES and not file.is_dir()]
    else:
        files = [Path(file) for file in source]
    files = files[:most]
    if not files:
        raise KinformerError(f"{source}: holds no pictures; give a PNG or JPEG, a folder of them, or data.")
    for file in files:
        read_head(file)
    input: Any = run.config.input
    shape, names = (*input.size, input.channels), set(classes_of(run))
    labels = (file.parent.name if file.parent.name in names else None for file in files)
    items = (Picture(str(file), decode(file, shape), label) for file, label in zip(files, labels, strict=True))
    return Inputs(items, len(files))


def probabilities_of(model: Any, batch: Sequence[Picture]) -> Tensor:
    """[images, classes] of pictures of one size."""
    pixels = np.stack([picture.pixels for picture in batch]).transpose(0, 3, 1, 2)
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.ascontiguousarray(pixels)).to(device_of(model))).float().cpu()
    require_finite(bool(logits.isfinite().all()))
    return logits.softmax(-1)


def pictures(run: TrainedRun, spec: str, count: int) -> Iterator[Picture]:
    """A PNG or JPEG, or those that stand in a folder, scaled and cropped to the size that the model of ``run`` was made
    for; or the first ``count`` test images of the data ``spec``.

    Raises :class:`KinformerError` for what is missing or damaged, and for images of other channels than the model's.
    """
    input: Any = run.config.input
    shape = (*input.size, input.channels)
    path = Path(spec).expanduser()
    if files := _files(path):
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


def _files(path: Path) -> list[Path]:
    """The picture ``path``, or those that stand in this folder beside no folder of more; none of other data."""
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        require_file(path)
        return [path]
    with reading(path):
        inside = sorted(path.iterdir()) if path.is_dir() else []
    if any(item.is_dir() for item in inside):
        return []
    return [item for item in inside if item.suffix.lower() in SUFFIXES]


def _line(picture: Picture, classes: Sequence[Mapping[str, Any]]) -> str:
    label = "" if picture.label is None else f" ({picture.label})"
    return f"{picture.name}{label}: {spell_classes(classes)}"
