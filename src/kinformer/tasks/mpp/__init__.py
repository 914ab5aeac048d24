"""Masked patch prediction: an encoder of images learns without labels to predict the colours of corrupted patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinformer.core.model import WholeModel
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.mpp.options import MppEvaluationOptions, MppOptions
from kinformer.tasks.predictions import Embedded, EmbeddingSettings
from kinformer.tasks.record import DataNeeds, Generation, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.task import Source, Task, TrainingPlan
from kinformer.tasks.vision import OF_IMAGES
from kinformer.training.metric import ACCURACY, Metric

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from kinformer.data import ImageData
    from kinformer.training.data_module import DataModule

NO_CLASSES = "it tells no classes yet; train it on for the task vision, with `init`."


def _objective(model: Any) -> Any:
    from kinformer.tasks.mpp.loss import PatchColours

    return PatchColours()


class Mpp(Task):
    """Measured by the bits of the colours of corrupted patches, beside counting them."""

    name = "mpp"
    title = "colours of masked patches"
    description = (
        "An encoder of images learns without labels, as BERT does of text (masked patch prediction of ViT): half of an "
        "image's patches are corrupted, most of them masked, and it predicts the mean colour of each. The task vision "
        "begins with the run by `init`; mae is the later form. Measured in bits per colour, beside counting colours."
    )
    models = Models(protocols=(WholeModel,), inputs=("patches",))
    data = DataNeeds(
        default="digits",
        refused=dict.fromkeys(
            ("tokenizer", "train_tokenizer", "text_field"), "is for text, not for images; leave it out."
        ),
    )
    evaluation = OF_IMAGES
    generation = Generation(refusal=NO_CLASSES)
    prediction = Prediction(refusal=NO_CLASSES)
    metrics = (Metric("bits_per_colour", "bits per colour of a corrupted patch"), ACCURACY)
    objectives = {"patch-colours": _objective}
    Options = MppOptions
    EvaluationOptions = MppEvaluationOptions

    def open(self, source: Source, options: MppOptions, cache: Path | None = None) -> ImageData:
        from kinformer.data.images import read_images

        return read_images(source.spec, cache=cache, holdout=source.holdout, size=options.resize)

    def fit(self, config: Any, data: ImageData | None) -> dict[str, Any]:
        from kinformer.tasks.mpp.fit import fitted_to_colours

        return fitted_to_colours(config, data)

    def length(self, data: ImageData, config: Any) -> int:
        from kinformer.tasks.vision.fit import length_of

        return length_of(config, data.shape)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.mpp.fit import check_colours

        check_colours(plan, model)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.mpp.rows import MppRows

        return MppRows(plan.data, plan.settings, plan.options, plan.config.input)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: MppEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.mpp.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def embed(self, subject: LoadedRun, source: Any, settings: EmbeddingSettings) -> Iterator[Embedded]:
        from kinformer.tasks.shared.pictures import embed_pictures

        return embed_pictures(subject, source, settings)


TASK = Mpp()
