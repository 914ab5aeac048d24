"""Masked autoencoder: an encoder of images learns without labels to predict patches from the few that it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.mae.options import MaeGenerationOptions, MaeOptions
from kinformer.tasks.record import Generation, GenerationSettings, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.image_options import FirstImages
from kinformer.tasks.shared.of_images import NO_CLASSES, PatchTask, WritesPng
from kinformer.tasks.shared.views import input_of
from kinformer.tasks.task import TrainingPlan
from kinformer.training.metric import Metric

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.mae.loss import PatchModel
    from kinformer.tasks.mae.rows import MaeRows
    from kinformer.tasks.shared.made import Made
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective


def _objective(model: PatchModel) -> Objective:
    from kinformer.tasks.mae.loss import MaskedPatches

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
        from kinformer.tasks.mae.fit import mixer_of_places

        return super().suits(config) and mixer_of_places(config) is None

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.tasks.mae.fit import fitted_to_masks

        return fitted_to_masks(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.mae.fit import check_masks

        check_masks(plan)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.mae.rows import MaeRows

        return MaeRows(plan.data, plan.settings, plan.options, input_of(plan.config))

    def objective(self, name: str | None, model: PatchModel, data: MaeRows | None = None) -> Objective:
        from kinformer.tasks.mae.loss import MaskedPatches

        self.choose_objective(name)
        return MaskedPatches(MaeOptions() if data is None else data.options)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: FirstImages,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.mae.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.tasks.mae.generate import complete

        return complete(subject, options, options.task_options)


TASK = Mae()
