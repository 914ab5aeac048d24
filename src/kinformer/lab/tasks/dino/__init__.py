"""Self-distillation: an encoder of images learns without labels to say the same of any part of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import FirstImages
from kinformer.lab.tasks.shared.records import NO_CLASSES, PATCH_INPUTS, PatchTask
from kinformer.lab.tasks.task import Generation, Models, Prediction, TrainingPlan
from kinformer.lab.training.logging import ACCURACY
from kinformer.runtime.errors import KinformerError, require, require_above

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model import StackedWholeModel
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import ImageData
    from kinformer.lab.tasks.dino.work import DinoRows
    from kinformer.lab.training.data_module import DataModule, Objective

# The options that the task of self-distillation has of its own. Free of PyTorch.


@dataclass(frozen=True, kw_only=True)
class DinoOptions:
    """Options of training by self-distillation."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    level: int = 1
    """Which encoder of a pyramid (hipt) learns, counted from below; those under it are frozen, so begin the second with
    `init`, the run of the first."""
    prototypes: int = 1024
    """Over how many classes of its own the model spreads its views (65536 in the paper)."""
    local_views: int = 8
    """Small views of every image, beside the two large ones."""
    area: float = 0.4
    """Large views of pixels show this share of an image's area or more, small ones from 5 % up to it. Of images of few
    pixels much has to be seen for a view to predict another: 0.8, without small views."""
    flip: bool = False
    """Half of the views are mirrored. Digits and letters must not be."""
    teacher_momentum: float = 0.996
    """The teacher's weights are a running mean of the student's, with this share of the old at the beginning of
    training and all of it at the end."""
    teacher_temperature: float = 0.04
    """What the teacher's logits are divided by, the lower the sharper; the student's by 0.1."""

    def __post_init__(self) -> None:
        for name, least in (("resize", 1), ("level", 1), ("prototypes", 2), ("local_views", 0)):
            require(name, getattr(self, name), least)
        if not 0.05 <= self.area <= 1:
            raise KinformerError(f"`area` is {self.area:g} but must lie between 0.05 and 1.")
        if not 0 <= self.teacher_momentum <= 1:
            raise KinformerError(f"`teacher_momentum` is {self.teacher_momentum:g} but must lie between 0 and 1.")
        require_above("teacher_temperature", self.teacher_temperature, 0)


@dataclass(frozen=True, kw_only=True)
class DinoEvaluationOptions(FirstImages):
    """Options of evaluating self-distillation."""

    nearest: int = 20
    """How many of the nearest training images say of which class an image is."""

    def __post_init__(self) -> None:
        require("nearest", self.nearest, 1)
        super().__post_init__()


def _objective(model: StackedWholeModel) -> Objective:
    from kinformer.lab.tasks.dino.work import SelfDistillation

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
        from kinformer.lab.tasks.vision.work import fitted

        classes = 0 if data is None else len(data.classes)
        fitted_config = fitted(config, data, classes=classes if classes > 1 else getattr(config.head, "classes", 2))
        if not hasattr(config.head, "classes"):
            fitted_config.pop("head", None)
        return fitted_config

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.dino.work import check_level, level_config, level_of
        from kinformer.lab.tasks.vision.work import check_channels

        check_channels(plan)
        level_config(plan.config, plan.options.level)
        check_level(level_of(model, plan.options.level))

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.dino.work import DinoRows

        return DinoRows(plan.data, plan.settings, plan.options, plan.config)

    def objective(self, name: str | None, model: StackedWholeModel, data: DinoRows | None = None) -> Objective:
        from kinformer.lab.tasks.dino.work import SelfDistillation
        from kinformer.lab.tasks.shared.images import keep_features

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
        from kinformer.lab.tasks.dino.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)


TASK = Dino()
