"""Image classification: an encoder of patches predicts the classes of images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.core.model import WholeModel
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.predictions import FileSource, Predicted, PredictionSettings
from kinformer.tasks.record import Generation, GenerationSettings, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.of_images import PATCH_INPUTS, PatchTask
from kinformer.tasks.task import NoOptions, Source, TrainingPlan
from kinformer.tasks.vision.options import VisionEvaluationOptions, VisionGenerationOptions, VisionOptions
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.shared.made import Made
    from kinformer.tasks.vision.rows import ImageRows
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective


def _classification(model: WholeModel) -> Objective:
    from kinformer.tasks.vision.rows import ImageClassification

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
        from kinformer.tasks.vision.fit import fitted

        return fitted(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.vision.fit import check_images

        check_images(plan, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.vision.rows import ImageRows

        return ImageRows(plan.data, plan.settings, plan.options)

    def objective(self, name: str | None, model: WholeModel, data: ImageRows | None = None) -> Objective:
        from kinformer.tasks.shared.image_features import keep_features
        from kinformer.tasks.vision.rows import Distillation, ImageClassification

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
        from kinformer.tasks.vision.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.tasks.vision.predict import classify

        return classify(subject, options, options.task_options, write)

    def predict(
        self, subject: LoadedRun, source: FileSource, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.tasks.vision.predict import predict

        return predict(subject, source, settings)


TASK = Vision()
