"""Classification: an encoder predicts the classes of labelled examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kinformer.core.model import WholeModel
from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    Evaluation,
    EvaluationSettings,
    Predicted,
    PredictionSettings,
)
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.task import (
    NOTHING_DRAWN,
    OF_TEXTS,
    READS_WHOLE_TEXTS,
    SPECIAL_TOKENS,
    DataNeeds,
    EvaluationNeeds,
    Generation,
    Models,
    NoOptions,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.progress import note
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import Labelled
    from kinformer.lab.data.labelled import TextItem, TextSource
    from kinformer.lab.training.data_module import DataModule, Objective

HEAD, FEWEST = "classification", 2
SHOWN = 8
"""How many classes a note counts, the most frequent first."""


def _classification(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.classify.work import Classification

    return Classification()


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of training on classification."""

    label_field: str | None = None
    """The column or field with the class, in a table whose columns are not called label and text."""


class Classify(Task):
    """Accuracy beside the most frequent class, class by class."""

    name = "classify"
    title = "classification"
    description = (
        "Learns to tell the classes of examples: a folder with a folder per class, or a table, .csv, .tsv or .jsonl. "
        "Measured by accuracy, with that of always predicting the most frequent class as the baseline."
    )
    models = Models(protocols=(WholeModel,), inputs=("tokens",))
    data = DataNeeds(
        missing="the task needs labelled examples; give `data` FOLDER, FILE.csv, FILE.tsv or FILE.jsonl.",
        tokenized=True,
        columns=True,
        refused={"train_tokenizer": "is for text without labels, not for classify; give `tokenizer`."},
    )
    evaluation = EvaluationNeeds(
        refused={"max_bytes": "is for text, not for examples; leave it out.", "seed": NOTHING_DRAWN}
    )
    generation = Generation(refusal=READS_WHOLE_TEXTS)
    prediction = Prediction(reads=("top_k", *OF_TEXTS))
    metrics = (ACCURACY, BITS_PER_LABEL)
    objectives = {"classification": _classification}
    special_apart = False
    Options: ClassVar[type] = ClassifyOptions
    EvaluationOptions: ClassVar[type] = PredictionTable

    def fits(self, config: ModelConfig) -> bool:
        return super().fits(config) and config.head.kind == HEAD

    def open(self, source: Source, options: Any, cache: Path | None = None) -> Labelled:
        from kinformer.lab.data import open_labelled

        return open_labelled(
            source.spec,
            cache=cache,
            tokenizer=source.tokenizer,
            holdout=source.holdout,
            text_field=source.text_field,
            label_field=options.label_field,
        )

    def vocab_size(self, data: Labelled) -> int:
        return data.vocab_size + SPECIAL_TOKENS

    def fit(self, config: ModelConfig, data: Labelled | None) -> dict[str, object]:
        classes = FEWEST if data is None else len(data.classes)
        if config.head.kind == HEAD:
            return {"head.classes": classes}
        return {"head": {"kind": HEAD, "classes": classes}}

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.shared.text import check_ids, check_sequence

        check_ids(plan, plan.data.vocab_size, self.special_apart)
        check_sequence(model)
        data: Labelled = plan.data
        examples = len(data.splits["train"])
        if self.data.columns and 2 * len(data.classes) > examples:
            columns = f" ({data.columns})" if data.columns else ""
            raise KinformerError(
                f"`data`: {data.name} has {plural(len(data.classes), 'class')} but only {plural(examples, 'example')} "
                f"to train on{columns}; say by `text_field` and `label_field` which columns are the text and the "
                "label, or give more examples of every class."
            )

    def tell(self, plan: TrainingPlan) -> None:
        from kinformer.lab.tasks.shared.text import ends_of

        data: Labelled = plan.data
        counts = Counter(data.splits["train"].labels.tolist()).most_common()
        shown = ", ".join(f"{data.classes[number]}: {count:,}" for number, count in counts[:SHOWN])
        more = f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
        columns = f"; {data.columns}" if data.columns else ""
        note(f"note: {data.name}: {plural(len(data.classes), 'class')} to train on, {shown}{more}{columns}.")
        if cut := data.cut("train", plan.settings.length - ends_of(plan.config).size):
            note(f"note: {cut}; `length` {plan.settings.length} can be raised.")

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.classify.work import Labels
        from kinformer.lab.tasks.shared.text import ends_of

        return Labels(plan.data, plan.settings, ends_of(plan.config))

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: PredictionTable,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.classify.work import evaluate

        return evaluate(self, subject, evaluation_settings, task_options, quiet)

    def spec_to_measure(self, subject: LoadedRun, data: str | None) -> str:
        """Return the name of the data to measure on."""
        from kinformer.lab.tasks.shared.text import spec_of

        return spec_of(subject.run, data)

    def predict(
        self, subject: LoadedRun, source: TextSource, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.classify.work import predict

        return predict(subject, source, settings, self.encoder(subject))

    def encoder(self, subject: LoadedRun) -> Callable[[TextItem], np.ndarray]:
        """Return a function that makes ids of a text, and raises for one that the task cannot read."""
        from kinformer.lab.data.labelled import refuse_empty
        from kinformer.lab.tasks.shared.text import tokenizer_of

        tokenizer = tokenizer_of(subject.run)

        def encode(item: TextItem) -> np.ndarray:
            refuse_empty(item)
            return tokenizer.encode(item.text)

        return encode

    def embed(self, subject: LoadedRun, source: TextSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
        from kinformer.lab.tasks.shared.text import embed_texts

        return embed_texts(subject, source, settings)


TASK = Classify()
