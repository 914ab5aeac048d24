"""Image: a causal model draws images value by value, each predicted from those before it in the order of a raster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.runtime.errors import KinformerError, require
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.record import Generation, GenerationSettings, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.image_options import FirstImages
from kinformer.tasks.shared.of_images import ImageTask, WritesPng
from kinformer.tasks.shared.views import input_of
from kinformer.tasks.task import TrainingPlan
from kinformer.training.metric import BITS_PER_DIM

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model import StackedCausalModel
    from kinformer.core.model_config import ModelConfig
    from kinformer.core.raster import Raster
    from kinformer.data.images import ImageData
    from kinformer.tasks.image.generate import Drawn
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective

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
    from kinformer.tasks.image.rows import PixelLoss

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
        from kinformer.tasks.image.fit import ABSOLUTE, image_changes

        position = {"position": "none"} if config.input.kind != INPUT and config.position.kind in ABSOLUTE else {}
        return image_changes(config, None if data is None else data.shape) | position

    def requested(self, config: ModelConfig, data: ImageData | None, options: ImageOptions) -> dict[str, object]:
        from kinformer.tasks.image.fit import with_classes

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
        from kinformer.tasks.image.fit import check_image

        check_image(plan.config, plan.data, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.image.rows import ImageRows

        return ImageRows(plan.data, plan.settings, input_of(plan.config))

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: ImageEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.image.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Drawn:
        from kinformer.tasks.image.generate import draw

        return draw(subject, options, options.task_options)


TASK = Image()
