"""Next token: a causal model predicts every token of a text from those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.lab.tasks.evaluation import Embedded, EmbeddingSettings, EvaluationReport, EvaluationSettings
from kinformer.lab.tasks.runs import LoadedRun, TrainedRun
from kinformer.lab.tasks.shared.options import NextTokenEvaluationOptions, NextTokenOptions
from kinformer.lab.tasks.shared.records import part_of
from kinformer.lab.tasks.task import (
    NOTHING_DRAWN,
    DataNeeds,
    EvaluationNeeds,
    Generation,
    GenerationSettings,
    Load,
    Models,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import BITS_PER_BYTE
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.lab.calibration.options import CalibrateOptions
    from kinformer.lab.calibration.risk import Samples
    from kinformer.lab.data import Corpus
    from kinformer.lab.data.labelled import TextSource
    from kinformer.lab.tasks.next_token.generate import Generated
    from kinformer.lab.training.data_module import DataModule, Objective


def _next_token(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.next_token.objectives import NextTokenLoss

    return NextTokenLoss()


def _deep_supervision(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.next_token.objectives import DeepSupervision

    return DeepSupervision.of(model)


def _exits(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.next_token.objectives import ExitLosses

    return ExitLosses.of(model)


def _multi_token(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.next_token.objectives import MultiToken

    return MultiToken.of(model)


class NextToken(Task):
    """Bits per byte, whatever the tokenizer, so that models with different ones compare."""

    name = "next-token"
    title = "next token"
    description = (
        "Learns to predict every token of a text from those before it, and continues texts. Measured in bits per byte "
        "of held-out text, with a 5-gram model as the baseline."
    )
    models = Models(protocols=(CausalModel,), inputs=("tokens",))
    data = DataNeeds(default="stdlib", tokenized=True, running_text=True)
    evaluation = EvaluationNeeds(refused={"seed": NOTHING_DRAWN})
    generation = Generation()
    prediction = Prediction(refusal="it continues texts; use kinformer generate, or kinformer embed for vectors.")
    metrics = (BITS_PER_BYTE,)
    objectives = {
        "next-token": _next_token,
        "deep-supervision": _deep_supervision,
        "exits": _exits,
        "multi-token": _multi_token,
    }
    Options = NextTokenOptions
    EvaluationOptions = NextTokenEvaluationOptions

    def open(self, source: Source, options: NextTokenOptions, cache: Path | None = None) -> Corpus:
        from kinformer.lab.data import open_corpus

        return open_corpus(source.spec, cache=cache, tokenizer=source.tokenizer, holdout=source.holdout)

    def vocab_size(self, data: Corpus) -> int:
        return data.tokenizer.vocab_size

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.shared.text import check_ids, check_long_enough, check_sequence

        check_ids(plan, self.vocab_size(plan.data), special_apart=False)
        check_sequence(model)
        if plan.options.segments:
            _check_endless(model)
        rows = plan.settings.batch_size if plan.options.segments else 1
        check_long_enough(plan.data, rows, plan.settings.length)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.next_token.objectives import NextTokens

        return NextTokens(plan.data, plan.settings, plan.options.segments, plan.options.reset_documents)

    def objective(self, name: str | None, model: nn.Module, data: DataModule | None = None) -> Objective:
        from kinformer.lab.tasks.next_token.objectives import RetrievedNextToken, RetrievedTokens

        if isinstance(data, RetrievedTokens) and self.choose_objective(name) == "next-token":
            return RetrievedNextToken()
        return super().objective(name, model, data)

    def evaluate(
        self,
        runs: Sequence[TrainedRun],
        load: Load,
        evaluation_settings: EvaluationSettings,
        task_options: NextTokenEvaluationOptions,
        quiet: bool = True,
    ) -> EvaluationReport:
        from kinformer.lab.tasks.next_token.evaluate import evaluate

        return evaluate(runs, load, evaluation_settings, task_options, quiet)

    def generate(
        self,
        subject: LoadedRun,
        prompt: str | bytes,
        options: GenerationSettings,
        write: Callable[[str], None] | None,
    ) -> Generated:
        from kinformer.lab.tasks.next_token.generate import continue_text

        return continue_text(subject, prompt, options, write)

    def samples(self, run: TrainedRun, model: CausalModel, options: CalibrateOptions) -> Samples:
        from kinformer.lab.tasks.next_token.evaluate import TextSamples

        return TextSamples(run, model, options)

    def embed(self, subject: LoadedRun, source: TextSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
        from kinformer.lab.tasks.shared.text import embed_texts

        return embed_texts(subject, source, settings)


def _check_endless(model: nn.Module) -> None:
    """Refuse a model whose state grows, or whose positions end, while it is carried through the whole corpus."""
    if (limit := part_of(model, "max_length")) is not None:
        raise KinformerError(
            f"`segments`: the state goes on without end, but this model's positions end at {limit}; choose "
            "another member, or another position such as `set` position=sinusoidal."
        )
    if any(getattr(module, "growth", "") == "linear" for module in model.modules()):
        raise KinformerError(
            "`segments`: the state goes on without end, but this model's grows with every token; choose another "
            'member, or bound it, as `set` \'layers.*.mixer.pattern={"kind": "local", "window": 256}\' does.'
        )


TASK = NextToken()
