"""Translation: an encoder-decoder reads a line and writes another (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import SourceModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, Predicted, PredictionSettings
from kinformer.lab.tasks.runs import LoadedRun, TrainedRun
from kinformer.lab.tasks.task import (
    NOTHING_DRAWN,
    OF_TEXTS,
    DataNeeds,
    EvaluationNeeds,
    Generation,
    GenerationSettings,
    Models,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import BITS_PER_BYTE, BLEU, CHRF
from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.adaptive.decoder import ExitEncoderDecoder
    from kinformer.core.model import CausalModel
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.calibration.options import CalibrateOptions
    from kinformer.lab.calibration.risk import Samples
    from kinformer.lab.data.labelled import TextSource
    from kinformer.lab.data.pairs import Languages, Parallel
    from kinformer.lab.tasks.next_token.generate import Generated
    from kinformer.lab.training.data_module import DataModule, Objective

# The options of translation, for training, measuring and generating. Free of PyTorch.


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of training on translation."""

    source: str | None = None
    """The language to translate from: the ending of its files, or the name of its column (English if it is there)."""
    target: str | None = None
    """The language to translate into."""
    label_smoothing: float = 0.1
    """The share of the probability that training spreads over all ids."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise KinformerError(f"`label_smoothing` is {self.label_smoothing:g} but must be 0 or more and below 1.")

    @property
    def languages(self) -> Languages:
        """Return the languages that these options name."""
        from kinformer.lab.data.pairs import Languages

        return Languages(self.source, self.target)


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Options of searching for translations with a beam."""

    beam: int = 4
    """How many translations of a sentence are followed; 1 always takes the most probable token."""
    length_penalty: float = 0.6
    """The exponent by which long translations are preferred; 0 prefers short ones."""

    def __post_init__(self) -> None:
        require("beam", self.beam, 1)
        require("length_penalty", self.length_penalty, 0)


@dataclass(frozen=True, kw_only=True)
class Decoding(BeamOptions):
    """Options of translating a text."""

    batch_size: int = 32
    """Sentences that are translated at a time; bounds the memory, does not change the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class TranslateEvaluationOptions(Decoding, PredictionTable):
    """Options of evaluating translation."""

    first: int | None = None
    """Measure the first N pairs only."""

    def __post_init__(self) -> None:
        Decoding.__post_init__(self)
        PredictionTable.__post_init__(self)
        require("first", self.first, 1)


ENDS = 2
"""Ids that a model has for itself: BOS and EOS."""
VOCABULARIES = ((100_000, 1000), (1_000_000, 4000), (4_000_000, 8000), (100_000_000, 32000))
"""(bytes, tokens): the size of a vocabulary for this many bytes of text or more, both sides together."""
OF_NUMBERS = 400
"""The size of a vocabulary of number words, which are made of some sixty pieces."""


def _smoothed(model: SourceModel) -> Objective:
    from kinformer.lab.tasks.translate.work import TranslationLoss

    return TranslationLoss(0.0)


def _exits(model: ExitEncoderDecoder) -> Objective:
    from kinformer.lab.tasks.translate.work import TranslationExits

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
        from kinformer.lab.data.pairs import open_pairs

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
        from kinformer.lab.data.pairs import Languages
        from kinformer.lab.tasks.shared.text import check_ids, check_sequence

        check_ids(plan, plan.data.tokenizer.vocab_size, special_apart=False)
        check_sequence(model)
        check_ends(plan.config)
        if plan.data.name == self.data.default and plan.options.languages != Languages():
            raise KinformerError(
                f"`source` and `target`: {plan.data.name} are numbers in English and German; leave them out."
            )

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.shared.text import ends_of
        from kinformer.lab.tasks.translate.work import TranslationPairs

        return TranslationPairs(plan.data, plan.settings, ends_of(plan.config), plan.options.label_smoothing)

    def objective(self, name: str | None, model: ExitEncoderDecoder, data: DataModule | None = None) -> Objective:
        from kinformer.lab.tasks.translate.work import TranslationExits, TranslationLoss

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
        from kinformer.lab.tasks.translate.work import evaluate

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
        from kinformer.lab.tasks.translate.work import translate_lines

        return translate_lines(subject, prompt, options, write)

    def samples(self, run: TrainedRun, model: CausalModel, options: CalibrateOptions) -> Samples:
        from kinformer.lab.tasks.translate.work import PairSamples

        self.check_generation(run)
        return PairSamples(self, run, model, options)

    def predict(
        self, subject: LoadedRun, source: TextSource, settings: PredictionSettings, task_options: BeamOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.translate.work import predict_lines

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
