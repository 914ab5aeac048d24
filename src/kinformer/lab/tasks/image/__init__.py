"""Image: a causal model draws images value by value, each predicted from those before it in the order of a raster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import FirstImages
from kinformer.lab.tasks.shared.records import ImageTask, WritesPng, input_of
from kinformer.lab.tasks.task import Generation, GenerationSettings, Models, Prediction, TrainingPlan
from kinformer.lab.training.logging import BITS_PER_DIM
from kinformer.runtime.errors import KinformerError, require

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model import StackedCausalModel
    from kinformer.core.pattern import Raster
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data.images import ImageData
    from kinformer.lab.tasks.image.work import Drawn
    from kinformer.lab.training.data_module import DataModule, Objective

INPUT, LEVELS = "pixels", 256


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options of training on images."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    conditional: bool = False
    """Tell the model the class of every image, so that it draws images of a class; for images with labels."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)


@dataclass(frozen=True, kw_only=True)
class ImageEvaluationOptions(FirstImages):
    """Options of evaluating models of images."""

    without_first: bool = False
    """Leave the first value of every image unscored, as the Linear Transformer's code does."""


@dataclass(frozen=True, kw_only=True)
class ImageGenerationOptions:
    """Options of generating images."""

    out: str | None = None
    """The PNG to write, a grid of `samples` images (samples.png in the run folder)."""
    complete: str | None = None
    """Complete images: a PNG or JPEG, or data as `data` takes it, of which the first test images are taken."""
    rows: int | None = None
    """With `complete`: how many rows from the top are kept (half of them)."""
    occluded: int = 8
    """With `complete`: how many images of the data are completed; each of them `samples` times."""
    label: str | None = None
    """Of a run that was trained `conditional`: the class, or classes a,b,c, of the images, in turns (all of them in
    turns; those of the images to complete)."""

    def __post_init__(self) -> None:
        require("rows", self.rows, 0)
        require("occluded", self.occluded, 1)
        if self.rows is not None and self.complete is None:
            raise KinformerError(f"`rows` {self.rows}: says what is kept of an image; give `complete` FILE too.")
        if self.occluded != ImageGenerationOptions.occluded and self.complete is None:
            raise KinformerError(f"`occluded` {self.occluded}: says how many are completed; give `complete` DATA too.")


def _pixels(model: StackedCausalModel) -> Objective:
    from kinformer.lab.tasks.image.work import PixelLoss

    return PixelLoss(model)


class Image(WritesPng, ImageTask):
    """Bits per dimension, every value of every image scored, beside what counting finds."""

    name = "image"
    title = "image"
    description = (
        "Learns to draw images value by value (IDX files, .npz, a folder of pictures, or 1,797 handwritten digits). "
        "Measured in bits per dimension, every value scored, beside a histogram of every place and the neighbours that "
        "are known; generate writes a PNG, `complete` the rest of occluded images."
    )
    models = Models(protocols=(CausalModel,), inputs=(INPUT,), from_tokens=True)
    generation = Generation(
        prompt=None,
        temperature=1.0,
        reads=("temperature", "top_k", "top_p", "min_p", "samples", "chunk"),
        unread="an image has a size, and ends with its last pixel",
    )
    prediction = Prediction(refusal="it draws images; use kinformer generate.")
    metrics = (BITS_PER_DIM,)
    objectives = {"pixels": _pixels}
    Options = ImageOptions
    EvaluationOptions = ImageEvaluationOptions
    GenerationOptions = ImageGenerationOptions

    def vocab_size(self, data: ImageData) -> int:
        return LEVELS

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.lab.tasks.image.work import ABSOLUTE, image_changes

        position = {"position": "none"} if config.input.kind != INPUT and config.position.kind in ABSOLUTE else {}
        return image_changes(config, None if data is None else data.shape) | position

    def requested(self, config: ModelConfig, data: ImageData | None, options: ImageOptions) -> dict[str, object]:
        from kinformer.lab.tasks.image.work import with_classes

        return with_classes(config, data) if options.conditional else {}

    def length(self, data: ImageData, config: ModelConfig) -> int:
        raster: Raster | None = getattr(config.input, "raster", None)
        if raster is None:
            raise KinformerError(
                f"`set` input={config.input.kind}: the task image needs the input pixels; leave it out, or choose "
                "another task."
            )
        return raster.size

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.image.work import check_image

        check_image(plan.config, plan.data, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.image.work import ImageRows

        return ImageRows(plan.data, plan.settings, input_of(plan.config))

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: ImageEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.image.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Drawn:
        from kinformer.lab.tasks.image.work import draw

        return draw(subject, options, options.task_options)


TASK = Image()
