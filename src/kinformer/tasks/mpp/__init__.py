"""Masked patch prediction: an encoder of images learns without labels to predict the colours of corrupted patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.mpp.options import MppOptions
from kinformer.tasks.record import Generation, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.image_options import FirstImages
from kinformer.tasks.shared.of_images import NO_CLASSES, PatchTask
from kinformer.tasks.shared.views import input_of
from kinformer.tasks.task import TrainingPlan
from kinformer.training.metric import ACCURACY, Metric

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.mae.loss import PatchModel
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective


def _objective(model: PatchModel) -> Objective:
    from kinformer.tasks.mpp.loss import PatchColours

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
        from kinformer.tasks.mpp.fit import keeps_patches

        return super().suits(config) and keeps_patches(config)

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.tasks.mpp.fit import fitted_to_colours

        return fitted_to_colours(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.mpp.fit import check_colours

        check_colours(plan, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.mpp.rows import MppRows

        return MppRows(plan.data, plan.settings, plan.options, input_of(plan.config))

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: FirstImages,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.mpp.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)


TASK = Mpp()
