"""Masked autoencoder: an encoder of images learns without labels to predict patches from the few that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import FirstImages, PatchOptions
from kinformer.lab.tasks.shared.records import NO_CLASSES, PatchTask, WritesPng, input_of
from kinformer.lab.tasks.task import Generation, GenerationSettings, Models, Prediction, TrainingPlan
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import ImageData
    from kinformer.lab.tasks.mae.work import MaeRows, PatchModel
    from kinformer.lab.tasks.shared.records import Made
    from kinformer.lab.training.data_module import DataModule, Objective

# The options that the task of masked patches has of its own. Free of PyTorch.


@dataclass(frozen=True, kw_only=True)
class MaeOptions(PatchOptions):
    """Options of training on masked patches."""

    masked: float = 0.75
    """The share of an image's patches that the encoder does not see."""
    raw_pixels: bool = False
    """Predict pixels as they are, instead of each patch's deviations from its mean, in units of their standard
    deviation."""

    def __post_init__(self) -> None:
        if not 0 < self.masked < 1:
            raise KinformerError(f"`masked` is {self.masked:g} but must be above 0 and below 1.")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MaeGenerationOptions:
    """Options of completing images from some of their patches."""

    image: str | None = None
    """The image to complete: a PNG or JPEG of any size, a folder of them, or data as `data` takes it, whose first
    `samples` test images are taken (the run's own data)."""
    out: str | None = None
    """The PNG to write: of every image what is seen of it, what the model makes of that, and the image (completed.png
    in the run folder)."""


def _objective(model: PatchModel) -> Objective:
    from kinformer.lab.tasks.mae.work import MaskedPatches

    return MaskedPatches(MaeOptions())


class Mae(WritesPng, PatchTask):
    """Measured by the squared error of masked patches, beside the mean of each."""

    name = "mae"
    title = "masked patches of images"
    description = (
        "An encoder of images learns without labels (MAE): it reads a quarter of an image's patches, and a small "
        "decoder, its head, predicts the pixels of the others. The task vision begins with the run by `init`. "
        "Measured by the squared error of masked patches; generate completes images and writes a PNG."
    )
    models = Models(protocols=(WholeModel,), inputs=("patches",))
    generation = Generation(
        prompt=None, temperature=1.0, reads=("samples",), unread="nothing is drawn where patches are predicted"
    )
    prediction = Prediction(refusal=NO_CLASSES)
    metrics = (Metric("masked_error", "mean squared error of masked patches"),)
    objectives = {"masked-patches": _objective}
    Options = MaeOptions
    EvaluationOptions = FirstImages
    GenerationOptions = MaeGenerationOptions

    def suits(self, config: ModelConfig) -> bool:
        from kinformer.lab.tasks.mae.work import mixer_of_places

        return super().suits(config) and mixer_of_places(config) is None

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.lab.tasks.mae.work import fitted_to_masks

        return fitted_to_masks(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.mae.work import check_masks

        check_masks(plan)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.mae.work import MaeRows

        return MaeRows(plan.data, plan.settings, plan.options, input_of(plan.config))

    def objective(self, name: str | None, model: PatchModel, data: MaeRows | None = None) -> Objective:
        from kinformer.lab.tasks.mae.work import MaskedPatches

        self.choose_objective(name)
        return MaskedPatches(MaeOptions() if data is None else data.options)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: FirstImages,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.mae.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.lab.tasks.mae.work import complete

        return complete(subject, options, options.task_options)


TASK = Mae()
