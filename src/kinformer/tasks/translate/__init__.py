"""Translation: an encoder-decoder reads a line and writes another (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kinformer.core.model import SourceModel
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.record import (
    NOTHING_DRAWN,
    OF_TEXTS,
    DataNeeds,
    EvaluationNeeds,
    Generation,
    GenerationSettings,
    Models,
    Prediction,
)
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.task import Source, Task, TrainingPlan
from kinformer.tasks.translate.options import BeamOptions, Decoding, TranslateEvaluationOptions, TranslateOptions
from kinformer.training.metric import BITS_PER_BYTE, BLEU, CHRF

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.model import CausalModel
    from kinformer.core.model_config import ModelConfig
    from kinformer.data.items import TextSource
    from kinformer.data.pairs import Parallel
    from kinformer.evaluation.exit_samples import Samples, Sampling
    from kinformer.tasks.next_token.generate import Generated
    from kinformer.tasks.translate.exit_losses import TranslationModel
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective

ENDS = 2
"""Ids that a model has for itself: BOS and EOS."""
VOCABULARIES = ((100_000, 1000), (1_000_000, 4000), (4_000_000, 8000), (100_000_000, 32000))
"""(bytes, tokens): the size of a vocabulary for this many bytes of text or more, both sides together."""
OF_NUMBERS = 400
"""The size of a vocabulary of number words, which are made of some sixty pieces."""


def _smoothed(model: SourceModel) -> Objective:
    from kinformer.tasks.translate.rows import TranslationLoss

    return TranslationLoss(0.0)


def _exits(model: TranslationModel) -> Objective:
    from kinformer.tasks.translate.exit_losses import TranslationExits

    return TranslationExits.of(model, 0.0)


class Translate(Task):
    """Measured by bits per byte of the target in training, by BLEU and chrF of its translations."""

    name = "translate"
    title = "translation"
    description = (
        "Learns to translate lines from pairs of them: two aligned files, a folder of those, a .tsv or a .jsonl. "
        "Measured by BLEU and chrF of its translations (sacrebleu), with the untranslated source as the baseline."
    )
    models = Models(protocols=(SourceModel,), inputs=("tokens",))
    data = DataNeeds(
        default="number-words",
        tokenized=True,
        refused={"text_field": "is for running text; name the sides of JSON lines with `source` and `target`."},
    )
    evaluation = EvaluationNeeds(
        refused={"max_bytes": "is for running text; give `first` N pairs.", "seed": NOTHING_DRAWN}
    )
    generation = Generation(
        prompt="lines", reads=(), unread="a line has one translation, the most probable that beam search finds"
    )
    prediction = Prediction(reads=OF_TEXTS)
    metrics = (BITS_PER_BYTE, BLEU, CHRF)
    objectives = {"translation": _smoothed, "exits": _exits}
    Options = TranslateOptions
    EvaluationOptions = TranslateEvaluationOptions
    GenerationOptions = Decoding
    PredictionOptions = BeamOptions
    settings = {"schedule": "inverse-sqrt", "average": 5}

    def open(self, source: Source, options: TranslateOptions, cache: Path | None = None) -> Parallel:
        from kinformer.data.pairs import open_pairs

        return open_pairs(source.spec, tokenizer=source.tokenizer, holdout=source.holdout, languages=options.languages)

    def default_vocabulary(self, source: Source, options: TranslateOptions) -> int | None:
        from importlib.util import find_spec

        from kinformer.runtime.progress import note

        train = self.open(source, options).splits["train"]
        size = sum(map(len, train.source)) + sum(map(len, train.target))
        fitting = [count for least, count in VOCABULARIES if size >= least]
        fitting = [OF_NUMBERS] if source.spec == self.data.default else fitting
        if fitting and find_spec("tokenizers") is None:
            note(
                "note: the package 'tokenizers' is not installed, so this is trained on bytes; "
                "pip install 'kinformer[text]' gives it a vocabulary."
            )
            return None
        return fitting[-1] if fitting else None

    def texts(self, source: Source, options: TranslateOptions) -> Iterable[str]:
        train = self.open(source, options).splits["train"]
        return (line.decode() for side in train for line in side)

    def vocab_size(self, data: Parallel) -> int:
        return data.tokenizer.vocab_size + ENDS

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.data.pairs import Languages
        from kinformer.tasks.shared.text import check_ids, check_sequence

        check_ids(plan, plan.data.tokenizer.vocab_size, special_apart=False)
        check_sequence(model)
        check_ends(plan.config)
        if plan.data.name == self.data.default and plan.options.languages != Languages():
            raise KinformerError(
                f"`source` and `target`: {plan.data.name} are numbers in English and German; leave them out."
            )

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.shared.text import ends_of
        from kinformer.tasks.translate.rows import TranslationPairs

        return TranslationPairs(plan.data, plan.settings, ends_of(plan.config), plan.options.label_smoothing)

    def objective(self, name: str | None, model: TranslationModel, data: DataModule | None = None) -> Objective:
        from kinformer.tasks.translate.exit_losses import TranslationExits
        from kinformer.tasks.translate.rows import TranslationLoss

        smoothing = getattr(data, "smoothing", 0.0)
        exits = self.choose_objective(name) == "exits"
        return TranslationExits.of(model, smoothing) if exits else TranslationLoss(smoothing)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: TranslateEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.translate.evaluate import evaluate

        check_ends(subject.run.config)
        return evaluate(self, subject, evaluation_settings, task_options, quiet)

    def check_generation(self, run: TrainedRun) -> None:
        check_ends(run.config)
        if run.tokenizer is None:
            raise KinformerError(f"{run.folder}: has no tokenizer; put its tokenizer.json there.")

    def generate(
        self,
        subject: LoadedRun,
        prompt: bytes | str | Iterable[bytes],
        options: GenerationSettings,
        write: Callable[[str], None] | None,
    ) -> Generated:
        from kinformer.tasks.translate.generate import translate_lines

        return translate_lines(subject, prompt, options, write)

    def samples(self, run: TrainedRun, model: CausalModel, sampling: Sampling) -> Samples:
        from kinformer.tasks.translate.calibrate import PairSamples

        self.check_generation(run)
        return PairSamples(self, run, model, sampling)

    def predict(
        self, subject: LoadedRun, source: TextSource, settings: PredictionSettings, task_options: BeamOptions
    ) -> Iterator[Predicted]:
        from kinformer.tasks.translate.generate import predict_lines

        return predict_lines(subject, source, settings, task_options)


def check_ends(config: ModelConfig) -> None:
    """Refuse a model that has no ids to begin and to end a translation with."""
    for name in ("bos_token", "eos_token"):
        if getattr(config.input, name, None) is None:
            raise KinformerError(
                f"the model has no {name}, with which a translation {'begins' if name[0] == 'b' else 'ends'}; give "
                f"`set` input.{name}=ID."
            )


TASK = Translate()
