"""Image classification: an encoder of patches predicts the classes of images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kinformer.core.model import WholeModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, FileSource, Predicted, PredictionSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import NOTHING, changes_of
from kinformer.lab.tasks.shared.records import PATCH_INPUTS, PatchTask
from kinformer.lab.tasks.task import Generation, GenerationSettings, Models, NoOptions, Prediction, Source, TrainingPlan
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL
from kinformer.runtime.errors import KinformerError, marked, plural, require
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import ImageData
    from kinformer.lab.tasks.shared.records import Made
    from kinformer.lab.tasks.vision.work import ImageRows
    from kinformer.lab.training.data_module import DataModule, Objective

# The options that the task of images has of its own, for training, measuring and generating. Free of PyTorch.


AUGMENTATIONS = ("crop", "resized-crop", "flip", "jitter", "randaugment", "erasing", "mixup", "cutmix")


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Options of training on image classification."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip,jitter,randaugment,erasing,mixup,
    cutmix, or none. Digits and letters must not be flipped."""
    repeats: int = 1
    """How often an image stands in a row of a batch, changed differently each time (repeated augmentation; DeiT: 3)."""
    smoothing: float = 0.0
    """Label smoothing: the share of a target that is spread over all classes."""
    label_share: float = 1.0
    """Learn from this share of the training images only, the same of each class."""

    teacher: str | None = None
    """A run of this task on the same classes, whose predictions are learnt beside the labels (distillation); the member
    deit learns them by a token of their own."""
    distillation: Literal["hard", "soft"] = "hard"
    """With `teacher`: learn the class that it finds most probable, or its probabilities."""
    distillation_weight: float = 0.5
    """With `teacher`: its share of the loss."""
    distillation_temperature: float = 3.0
    """With `distillation` soft: what its and the student's logits are divided by."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)
        require("repeats", self.repeats, 1)
        changes = self.augmentations
        if self.repeats > 1 and not changes:
            raise KinformerError(
                f"`repeats` {self.repeats}: gives the same image again where `augment` changes none; give that too, or "
                "leave it out."
            )
        if self.teacher is not None:
            object.__setattr__(self, "teacher", str(Path(self.teacher).expanduser().resolve()))
        self._check_distillation()
        if not 0 <= self.smoothing < 1:
            raise KinformerError(f"`smoothing` is {self.smoothing:g} but must be at least 0 and below 1.")
        if not 0 < self.label_share <= 1:
            raise KinformerError(f"`label_share` is {self.label_share:g} but must be above 0 and at most 1.")

    def _check_distillation(self) -> None:
        if not 0 <= self.distillation_weight <= 1:
            raise KinformerError(f"`distillation_weight` is {self.distillation_weight:g} but must lie between 0 and 1.")
        if self.distillation_temperature <= 0:
            raise KinformerError(
                f"`distillation_temperature` is {self.distillation_temperature:g} but must be above 0."
            )
        for name, needs, idle in (
            ("distillation", "`teacher` RUN", self.teacher is None),
            ("distillation_weight", "`teacher` RUN", self.teacher is None),
            ("distillation_temperature", "`distillation` soft", self.distillation == "hard" or self.teacher is None),
        ):
            if idle and getattr(self, name) != getattr(VisionOptions, name):
                raise KinformerError(f"{marked(name)}: does nothing without {needs}; give that too, or leave it out.")

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, AUGMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class VisionEvaluationOptions(PredictionTable):
    """Options of evaluating image classification."""

    max_items: int | None = None
    """Measure on the first N images only."""

    def __post_init__(self) -> None:
        require("max_items", self.max_items, 1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class VisionGenerationOptions:
    """Options of classifying images."""

    image: str | None = None
    """The image to classify: a PNG or JPEG of any size, a folder of them, or data as `data` takes it, whose first
    `samples` test images are taken."""
    classes: int = 5
    """How many of the most probable classes are shown."""

    def __post_init__(self) -> None:
        require("classes", self.classes, 1)


def _classification(model: WholeModel) -> Objective:
    from kinformer.lab.tasks.vision.work import ImageClassification

    return ImageClassification()


class Vision(PatchTask):
    """Accuracy beside the most frequent class, class by class, and how well probabilities are calibrated."""

    name = "vision"
    title = "image classification"
    description = (
        "Learns to tell the classes of images: IDX files, an .npz archive, or a folder with a folder of pictures per "
        "class. Measured by accuracy, with that of always predicting the most frequent class as the baseline; "
        "generate tells the most probable classes of pictures."
    )
    models = Models(protocols=(WholeModel,), inputs=PATCH_INPUTS, from_tokens=True)
    generation = Generation(
        prompt=None, temperature=1.0, reads=("samples",), unread="nothing is drawn where images are classified"
    )
    prediction = Prediction(reads=("top_k", "batch_size"))
    metrics = (ACCURACY, BITS_PER_LABEL)
    objectives = {"classification": _classification}
    Options = VisionOptions
    EvaluationOptions = VisionEvaluationOptions
    GenerationOptions = VisionGenerationOptions

    def open(self, source: Source, options: VisionOptions, cache: Path | None = None) -> ImageData:
        images = super().open(source, options, cache)
        if len(images.classes) < 2:
            classes = plural(1, "class") if images.classes else "no classes"
            raise KinformerError(
                f"{source.spec}: has {classes} to tell apart; give images with labels of "
                "two or more, such as a folder with a folder per class."
            )
        return images

    def fit(self, config: ModelConfig, data: ImageData | None) -> dict[str, object]:
        from kinformer.lab.tasks.vision.work import fitted

        return fitted(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.vision.work import check_images

        check_images(plan, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.vision.work import ImageRows

        return ImageRows(plan.data, plan.settings, plan.options)

    def objective(self, name: str | None, model: WholeModel, data: ImageRows | None = None) -> Objective:
        from kinformer.lab.tasks.shared.images import keep_features
        from kinformer.lab.tasks.vision.work import Distillation, ImageClassification

        self.choose_objective(name)
        options = VisionOptions() if data is None else data.options
        teacher = None if data is None else data.teacher
        if data is not None:
            data.features = keep_features(model.input, changed=bool(options.augmentations or teacher))
        return ImageClassification(options.smoothing) if teacher is None else Distillation(teacher, options)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: VisionEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.vision.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.lab.tasks.vision.work import classify

        return classify(subject, options, options.task_options, write)

    def predict(
        self, subject: LoadedRun, source: FileSource, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.vision.work import predict

        return predict(subject, source, settings)


TASK = Vision()
