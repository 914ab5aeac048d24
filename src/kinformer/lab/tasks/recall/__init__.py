"""Recall: a causal model reads keys with values, and predicts the value of each key that comes again
(``lab.data.mqar``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, Predicted, PredictionSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import whole_numbers
from kinformer.lab.tasks.task import (
    DataNeeds,
    EvaluationNeeds,
    Generation,
    GenerationSettings,
    Models,
    NoOptions,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL
from kinformer.runtime.errors import require, require_above
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.lab.data.labelled import TextSource
    from kinformer.lab.data.mqar import Recall
    from kinformer.lab.tasks.next_token.generate import Generated
    from kinformer.lab.training.data_module import DataModule, Objective

NAME = "recall"


@dataclass(frozen=True, kw_only=True)
class RecallOptions:
    """Options of training on recall."""

    pairs: str = "4,8,16"
    """How many keys and values a row of `length` tokens has: one of these numbers, drawn for every row."""
    symbols: int = 256
    """How many tokens there are; keys are of the lower half, values of the upper."""
    gap_power: float = 0.01
    """Queries come after i pairs of tokens with a probability as i to the power of this less 1: most of them soon."""
    zero_fillers: bool = False
    """Zeros stand between queries, instead of random tokens."""

    def __post_init__(self) -> None:
        numbers("`pairs`", self.pairs)
        require("symbols", self.symbols, 4)
        require_above("gap_power", self.gap_power, 0)

    @property
    def data(self) -> Recall:
        """Return the rows that these options describe."""
        from kinformer.lab.data.mqar import Recall

        return Recall(
            pairs=numbers("`pairs`", self.pairs),
            symbols=self.symbols,
            gap_power=self.gap_power,
            random_fillers=not self.zero_fillers,
        )


@dataclass(frozen=True, kw_only=True)
class RecallEvaluationOptions(PredictionTable):
    """Options of evaluating recall."""

    at_pairs: str | None = None
    """Measure rows of these numbers of pairs instead of the trained ones, as in 4,8,16,32."""
    rows: int = 512
    """How many rows of each number of pairs are measured."""

    def __post_init__(self) -> None:
        require("rows", self.rows, 1)
        if self.at_pairs is not None:
            numbers("`at_pairs`", self.at_pairs)
        super().__post_init__()

    @property
    def pairs_to_measure(self) -> tuple[int, ...] | None:
        """Return the numbers of ``at_pairs``."""
        return None if self.at_pairs is None else numbers("`at_pairs`", self.at_pairs)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Return ``"4,8"`` as distinct numbers of pairs, in order."""
    return whole_numbers(flag, text, "pairs", "4,8,16")


def _recall(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.recall.work import RecallLoss

    return RecallLoss(())


class RecallTask(Task):
    """Accuracy over all queries and by the number of pairs, beside guessing among the values of the row."""

    name = NAME
    title = "recall"
    description = (
        "Learns to tell which value stood behind a key (multi-query associative recall, Arora et al. 2023). Measured "
        "by accuracy over all queries and by the number of pairs; of k pairs, guessing one of the values is right in "
        "1/k."
    )
    models = Models(protocols=(CausalModel,), inputs=("tokens",))
    data = DataNeeds(
        default=NAME,
        refused=dict.fromkeys(
            ("data", "holdout", "tokenizer", "train_tokenizer"), "recall makes its own rows of symbols; leave it out."
        ),
    )
    evaluation = EvaluationNeeds(
        refused=dict.fromkeys(
            ("data", "max_bytes"), "recall makes its own rows; leave it out, or give `rows` and `at_pairs`."
        )
    )
    generation = Generation(reads=(), unread="a key has one answer, the most probable")
    prediction = Prediction(reads=("text_field", "label_field", "format"))
    metrics = (ACCURACY, BITS_PER_LABEL)
    objectives = {"recall": _recall}
    Options = RecallOptions
    EvaluationOptions = RecallEvaluationOptions

    def open(self, source: Source, options: RecallOptions, cache: Path | None = None) -> Recall:
        return options.data

    def vocab_size(self, data: Recall) -> int:
        return data.symbols

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.shared.text import check_ids, check_sequence

        check_ids(plan, plan.data.symbols, special_apart=False)
        check_sequence(model)
        plan.data.check(plan.settings.length)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.recall.work import RecallData

        return RecallData(plan.data, plan.settings)

    def objective(self, name: str | None, model: nn.Module, data: DataModule | None = None) -> Objective:
        from kinformer.lab.tasks.recall.work import RecallData, RecallLoss

        self.choose_objective(name)
        return RecallLoss(data.data.pairs if isinstance(data, RecallData) else ())

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: RecallEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.recall.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self,
        subject: LoadedRun,
        prompt: str | bytes,
        options: GenerationSettings,
        write: Callable[[str], None] | None,
    ) -> Generated:
        from kinformer.lab.tasks.recall.work import answer

        return answer(subject, prompt, options.seed, write)

    def predict(
        self, subject: LoadedRun, source: TextSource, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.recall.work import answer, symbols_of
        from kinformer.lab.tasks.shared.answers import answers_to

        return answers_to(source, settings, lambda text: symbols_of(text, subject.model.vocab_size), subject, answer)


TASK = RecallTask()
