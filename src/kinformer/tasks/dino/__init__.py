"""Self-distillation: an encoder of images learns without labels to say the same of any part of one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.tasks.dino.options import DinoEvaluationOptions, DinoOptions
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.record import Generation, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.of_images import NO_CLASSES, PATCH_INPUTS, PatchTask
from kinformer.tasks.task import TrainingPlan
from kinformer.training.metric import ACCURACY

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model import StackedWholeModel
    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.dino.rows import DinoRows
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective


def _objective(model: StackedWholeModel) -> Objective:
    from kinformer.tasks.dino.loss import SelfDistillation

    return SelfDistillation(model, DinoOptions())


class Dino(PatchTask):
    """Measured by whether the nearest training images, by the encoder's vectors, are of the same class."""

    name = "dino"
    title = "self-distillation of images"
    description = (
        "An encoder of images learns without labels (DINO): a student that sees a small view of an image says what a "
        "teacher, the running mean of its weights, says of a large one. Of a pyramid (hipt) `level` says which of its "
        "encoders learns; the next, and the task vision, begin with the run by `init`. evaluate looks, where images "
        "have labels, for the class of the nearest training images."
    )
    models = Models(protocols=(WholeModel,), inputs=PATCH_INPUTS)
    data = replace(
        PatchTask.data,
        refused={
            **PatchTask.data.refused,
            "validation_tokens": "self-distillation is validated by a fixed number of images; leave it out.",
        },
    )
    generation = Generation(refusal=NO_CLASSES)
    prediction = Prediction(refusal=NO_CLASSES)
    metrics = (ACCURACY,)
    objectives = {"self-distillation": _objective}
    Options = DinoOptions
    EvaluationOptions = DinoEvaluationOptions
    settings = {"validate_every": 0}

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        """Return the overrides; the classes of images without labels are those of the recipe, until there are some."""
        from kinformer.tasks.vision.fit import fitted

        classes = 0 if data is None else len(data.classes)
        fitted_config = fitted(config, data, classes=classes if classes > 1 else getattr(config.head, "classes", 2))
        if not hasattr(config.head, "classes"):
            fitted_config.pop("head", None)
        return fitted_config

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.dino.loss import check_level, level_of
        from kinformer.tasks.dino.rows import level_config
        from kinformer.tasks.vision.fit import check_channels

        check_channels(plan)
        level_config(plan.config, plan.options.level)
        check_level(level_of(model, plan.options.level))

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.dino.rows import DinoRows

        return DinoRows(plan.data, plan.settings, plan.options, plan.config)

    def objective(self, name: str | None, model: StackedWholeModel, data: DinoRows | None = None) -> Objective:
        from kinformer.tasks.dino.loss import SelfDistillation
        from kinformer.tasks.shared.image_features import keep_features

        self.choose_objective(name)
        result = SelfDistillation(model, DinoOptions() if data is None else data.options)
        if data is not None:
            data.features = keep_features(result.teacher.input, changed=False)
        return result

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: DinoEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.dino.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)


TASK = Dino()
