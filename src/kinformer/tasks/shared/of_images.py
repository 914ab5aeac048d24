"""The bases of the tasks of images: where images come from, and the options that mean nothing to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinformer.tasks.predictions import Embedded, EmbeddingSettings, FileSource
from kinformer.tasks.record import NOTHING_DRAWN, DataNeeds, EvaluationNeeds
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.task import Source, Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData

PATCH_INPUTS = ("patches", "tiles")
"""Kinds of inputs that cut an image into patches."""
NO_CLASSES = "it tells no classes yet; train it on for the task vision, with `init`."
"""Why an encoder that learns without labels predicts nothing."""


class ImageTask(Task):
    """The base of tasks of images, whose options have `resize`."""

    data = DataNeeds(
        default="digits",
        refused=dict.fromkeys(
            ("tokenizer", "train_tokenizer", "text_field"), "is for text, not for images; leave it out."
        ),
    )
    evaluation = EvaluationNeeds(
        refused={"max_bytes": "is for text; give `max_items` N instead.", "seed": NOTHING_DRAWN}
    )

    def open(self, source: Source, options: Any, cache: Path | None = None) -> ImageData:
        from kinformer.data.images import read_images

        return read_images(source.spec, cache=cache, holdout=source.holdout, size=options.resize)


class PatchTask(ImageTask):
    """The base of tasks of encoders that read patches."""

    evaluation = EvaluationNeeds(
        refused={
            **ImageTask.evaluation.refused,
            "chunk": "is for tokens, and images are computed some at a time; leave it out.",
        }
    )

    def length(self, data: ImageData, config: ModelConfig) -> int:
        """Return the number of positions of an image of the data, whose size may differ from that for which positions
        were learned."""
        from kinformer.tasks.vision.fit import length_of

        return length_of(config, data.shape)

    def embed(self, subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
        from kinformer.tasks.shared.pictures import embed_pictures

        return embed_pictures(subject, source, settings)


class WritesPng:
    """Mixin of tasks that generate a picture file."""

    def check_generation(self, run: TrainedRun) -> None:
        """Refuse to begin where no picture can be written."""
        from kinformer.data.image_files import require_pillow

        require_pillow(f"generate {run.folder}")
