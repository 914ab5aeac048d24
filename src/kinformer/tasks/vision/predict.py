"""The most probable classes of pictures: of a file, of those in a folder, or of test images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kinformer.core.model import WholeModel
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import FileSource, Predicted, PredictionSettings
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.arriving import batched
from kinformer.tasks.shared.classes import ClassProbability, classes_of, most_probable, spell_classes
from kinformer.tasks.shared.made import Made
from kinformer.tasks.shared.pictures import Picture, laid, picture_batches, pictures, pictures_in
from kinformer.tasks.vision.evaluate import AT_ONCE
from kinformer.tasks.vision.options import VisionGenerationOptions


def classify(
    subject: LoadedRun,
    options: GenerationSettings,
    task_options: VisionGenerationOptions,
    write: Callable[[str], None] | None,
) -> Made:
    """Return the ``task_options.classes`` most probable classes of each image; ``write`` receives a line for each."""
    run, model = subject.run, subject.model
    if task_options.image is None:
        raise KinformerError("there must be an image to classify; give `image` FILE, a folder, or data such as digits.")
    names = classes_of(run)
    predictions: list[dict[str, object]] = []
    started_at = time.perf_counter()
    for batch in batched(pictures(run, task_options.image, options.samples), AT_ONCE):
        for picture, probabilities in zip(batch, probabilities_of(model, batch), strict=True):
            classes = most_probable(probabilities, names, task_options.classes)
            if write is not None:
                write(("\n" if predictions else "") + _line(picture, classes))
            predictions.append({"image": picture.name, "label": picture.label, "classes": classes})
    seconds = time.perf_counter() - started_at
    facts = {"run": str(run.folder), "images": predictions, "seconds": seconds}
    return Made(
        facts, f"{plural(len(predictions), 'image')} in {seconds:.3f} s, {len(predictions) / seconds:.3g} images/s"
    )


def predict(subject: LoadedRun, source: FileSource, settings: PredictionSettings) -> Iterator[Predicted]:
    """Yield the most probable classes of the images of ``source``, in order: a picture, all in a folder and its
    folders, the test images of data, or a list of pictures' paths."""
    names = classes_of(subject.run)
    taken = pictures_in(subject.run, source, settings.max_items, names)
    for batch in picture_batches(taken, settings, "predicting"):
        for picture, probabilities in zip(batch, probabilities_of(subject.model, batch), strict=True):
            classes = most_probable(probabilities, names, settings.top_k)
            label = {} if picture.label is None else {"label": picture.label}
            yield Predicted({"image": picture.name} | label | {"classes": classes}, _line(picture, classes))


def probabilities_of(model: WholeModel, batch: Sequence[Picture]) -> Tensor:
    """Return the probabilities [images, classes] of pictures of one size."""
    with torch.inference_mode():
        logits = model(laid(batch, model)).float().cpu()
    require_finite(bool(logits.isfinite().all()))
    return logits.softmax(-1)


def _line(picture: Picture, classes: Sequence[ClassProbability]) -> str:
    label = "" if picture.label is None else f" ({picture.label})"
    return f"{picture.name}{label}: {spell_classes(classes)}"
