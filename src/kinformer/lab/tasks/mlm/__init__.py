"""Masked language modelling: an encoder predicts masked tokens of a text (Devlin et al. 2019, BERT, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

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
from kinformer.lab.tasks.shared.options import MaskPredictionOptions, MlmOptions
from kinformer.lab.tasks.task import (
    OF_TEXTS,
    READS_WHOLE_TEXTS,
    SPECIAL_TOKENS,
    DataNeeds,
    Generation,
    Models,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import ACCURACY, bits_per_masked
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import Corpus
    from kinformer.lab.data.labelled import TextSource
    from kinformer.lab.training.data_module import DataModule, Objective

HEAD = "masked_language"


def _masked_language(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.mlm.work import MaskedLanguage

    return MaskedLanguage()


def _mlm_cpc(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.mlm.work import MaskedLanguageCpc

    return MaskedLanguageCpc.of(model)


class MaskedLanguageModelling(Task):
    """Measured on masks that are the same in every evaluation, with counts of the same tokens as baselines."""

    name = "mlm"
    title = "masked language modelling"
    description = (
        "Learns to predict masked tokens of a text from all others. Measured in bits per masked byte (with a "
        "tokenizer, per masked token) and accuracy, with counts of tokens and of pairs of tokens as baselines."
    )
    models = Models(protocols=(WholeModel,), inputs=("tokens",))
    data = DataNeeds(default="stdlib", tokenized=True, running_text=True)
    generation = Generation(refusal=READS_WHOLE_TEXTS)
    prediction = Prediction(reads=("top_k", *OF_TEXTS))
    metrics = (bits_per_masked("byte"), ACCURACY)
    objectives = {"masked-language": _masked_language, "mlm-cpc": _mlm_cpc}
    Options = MlmOptions
    EvaluationOptions: ClassVar[type] = PredictionTable
    PredictionOptions = MaskPredictionOptions

    def fits(self, config: ModelConfig) -> bool:
        return super().fits(config) and config.head.kind == HEAD

    def open(self, source: Source, options: MlmOptions, cache: Path | None = None) -> Corpus:
        from kinformer.lab.data import open_corpus

        return open_corpus(source.spec, cache=cache, tokenizer=source.tokenizer, holdout=source.holdout)

    def vocab_size(self, data: Corpus) -> int:
        return data.tokenizer.vocab_size + SPECIAL_TOKENS

    def fit(self, config: ModelConfig, data: Corpus | None) -> dict[str, object]:
        return {} if config.head.kind == HEAD else {"head": HEAD}

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.shared.text import check_ids, check_long_enough, check_sequence

        check_ids(plan, plan.data.tokenizer.vocab_size, special_apart=False)
        check_sequence(model)
        check_long_enough(plan.data, 1, plan.settings.length)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.mlm.work import MaskedTokens, masking_of
        from kinformer.lab.tasks.shared.text import ends_of

        masking = masking_of(plan.config, plan.tokenizer, plan.options)
        return MaskedTokens(plan.data, plan.settings, masking, ends_of(plan.config))

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: PredictionTable,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.mlm.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def predict(
        self,
        subject: LoadedRun,
        source: TextSource,
        settings: PredictionSettings,
        task_options: MaskPredictionOptions,
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.mlm.work import predict

        return predict(subject, source, settings, task_options)

    def embed(self, subject: LoadedRun, source: TextSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
        from kinformer.lab.tasks.shared.text import embed_texts

        return embed_texts(subject, source, settings)


TASK = MaskedLanguageModelling()
