"""Super-resolution: an encoder-decoder reads a small image and draws a larger one (Parmar et al. 2018, section 5.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import SourceModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import FirstImages
from kinformer.lab.tasks.shared.records import ImageTask, PixelInput, WritesPng, input_of
from kinformer.lab.tasks.task import Generation, GenerationSettings, Models, Prediction, Source, TrainingPlan
from kinformer.lab.training.logging import BITS_PER_DIM
from kinformer.runtime.errors import KinformerError, require

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.model import StackedCausalModel
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data.images import ImageData
    from kinformer.lab.tasks.image.work import Drawn
    from kinformer.lab.training.data_module import DataModule, Objective

INPUT, LEVELS = "pixels", 256


@dataclass(frozen=True, kw_only=True)
class SuperResolutionOptions:
    """Options of training on small images and large ones."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    factor: int = 4
    """How many times as many pixels on a side the drawn image has: 4 makes 32 x 32 of 8 x 8."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)
        require("factor", self.factor, 2)


@dataclass(frozen=True, kw_only=True)
class SuperResolutionGenerationOptions:
    """Options of enlarging images."""

    image: str | None = None
    """The pictures to enlarge: a PNG or JPEG, or a folder of them, each of the size that the model reads, or of another
    and made smaller first; or data as `data` takes it, whose first test images are made smaller (the run's own)."""
    out: str | None = None
    """The PNG to write: a line for every picture, which begins with it, then `samples` drawn images, then the large
    image, where there is one (enlarged.png in the run folder)."""
    enlarged: int = 8
    """How many test images of data are enlarged; each of them `samples` times."""

    def __post_init__(self) -> None:
        require("enlarged", self.enlarged, 1)


def _pixels(model: StackedCausalModel) -> Objective:
    from kinformer.lab.tasks.super_resolution.work import EnlargingLoss

    return EnlargingLoss(model)


class SuperResolution(WritesPng, ImageTask):
    """Bits per dimension of the large image, the small one being known, beside what counting finds."""

    name = "super-resolution"
    title = "super-resolution of images"
    description = (
        "Learns to enlarge images: an encoder reads an image made smaller, the mean of every block of pixels, and a "
        "decoder draws the image value by value (IDX files, .npz, a folder of pictures, or 1,797 handwritten digits). "
        "Measured in bits per dimension, beside what counting finds with the small image and the neighbours that are "
        "known; generate writes a PNG."
    )
    models = Models(protocols=(SourceModel,), inputs=(INPUT,), from_tokens=True)
    generation = Generation(
        prompt=None,
        temperature=1.0,
        reads=("temperature", "top_k", "top_p", "min_p", "samples"),
        unread="an image has a size, and ends with its last pixel",
    )
    prediction = Prediction(refusal="it enlarges images; use kinformer generate.")
    metrics = (BITS_PER_DIM,)
    objectives = {"pixels": _pixels}
    Options = SuperResolutionOptions
    EvaluationOptions = FirstImages
    GenerationOptions = SuperResolutionGenerationOptions

    def open(self, source: Source, options: SuperResolutionOptions, cache: Path | None = None) -> ImageData:
        images = super().open(source, options, cache)
        height, width, _ = images.shape
        if height % options.factor or width % options.factor:
            raise KinformerError(
                f"`factor` {options.factor}: the images of {images.name} have {height} x {width} pixels, which are not "
                "whole blocks with this many cells on a side; choose a divisor of both."
            )
        return images

    def vocab_size(self, data: ImageData) -> int:
        return LEVELS

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.lab.tasks.super_resolution.work import enlarging_changes

        return enlarging_changes(config, data)

    def requested(
        self, config: ModelConfig, data: ImageData | None, options: SuperResolutionOptions
    ) -> dict[str, object]:
        from kinformer.lab.tasks.super_resolution.work import source_changes

        return {} if data is None else source_changes(config, data, options.factor)

    def length(self, data: ImageData, config: ModelConfig) -> int:
        from kinformer.lab.tasks.super_resolution.work import require_pixels

        require_pixels(config)
        input: PixelInput = input_of(config)
        return input.raster.size

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.super_resolution.work import check_enlarging

        check_enlarging(plan, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.super_resolution.work import EnlargingRows

        return EnlargingRows(plan.data, plan.settings, plan.config)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: FirstImages,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.super_resolution.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Drawn:
        from kinformer.lab.tasks.super_resolution.work import enlarge

        return enlarge(subject, options, options.task_options)


TASK = SuperResolution()
