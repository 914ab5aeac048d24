"""Masked patch prediction: an encoder of images learns without labels to predict the colours of corrupted patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import FirstImages, PatchOptions
from kinformer.lab.tasks.shared.records import NO_CLASSES, PatchTask, input_of
from kinformer.lab.tasks.task import Generation, Models, Prediction, TrainingPlan
from kinformer.lab.training.logging import ACCURACY, Metric
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import ImageData
    from kinformer.lab.tasks.mae.work import PatchModel
    from kinformer.lab.training.data_module import DataModule, Objective

# The options that masked patch prediction has of its own. Free of PyTorch.


@dataclass(frozen=True, kw_only=True)
class MppOptions(PatchOptions):
    """Options of training on the colours of corrupted patches."""

    corrupted: float = 0.5
    """The share of an image's patches that are corrupted, and whose colours are predicted: 80 % of them are masked,
    10 % another patch of the image, 10 % as they are."""

    def __post_init__(self) -> None:
        if not 0 < self.corrupted <= 1:
            raise KinformerError(f"`corrupted` is {self.corrupted:g} but must be above 0 and at most 1.")
        super().__post_init__()


def _objective(model: PatchModel) -> Objective:
    from kinformer.lab.tasks.mpp.work import PatchColours

    return PatchColours()


class Mpp(PatchTask):
    """Measured by the bits of the colours of corrupted patches, beside counting them."""

    name = "mpp"
    title = "colours of masked patches"
    description = (
        "An encoder of images learns without labels, as BERT does of text (masked patch prediction of ViT): half of an "
        "image's patches are corrupted, most of them masked, and it predicts the mean colour of each. The task vision "
        "begins with the run by `init`; mae is the later form. Measured in bits per colour, beside counting colours."
    )
    models = Models(protocols=(WholeModel,), inputs=("patches",))
    generation = Generation(refusal=NO_CLASSES)
    prediction = Prediction(refusal=NO_CLASSES)
    metrics = (Metric("bits_per_colour", "bits per colour of a corrupted patch"), ACCURACY)
    objectives = {"patch-colours": _objective}
    Options = MppOptions
    EvaluationOptions = FirstImages

    def suits(self, config: ModelConfig) -> bool:
        from kinformer.lab.tasks.mpp.work import keeps_patches

        return super().suits(config) and keeps_patches(config)

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.lab.tasks.mpp.work import fitted_to_colours

        return fitted_to_colours(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.mpp.work import check_colours

        check_colours(plan, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.mpp.work import MppRows

        return MppRows(plan.data, plan.settings, plan.options, input_of(plan.config))

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: FirstImages,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.mpp.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)


TASK = Mpp()
