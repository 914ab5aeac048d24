"""Algorithm: a causal model copies, reverses, adds, or computes parity (``data.algorithms``), also of lengths beyond
training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL, SEQUENCE_ACCURACY
from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.tables import PredictionTable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.lab.data.algorithms import AlgorithmData
    from kinformer.lab.data.labelled import TextSource
    from kinformer.lab.tasks.next_token.generate import Generated
    from kinformer.lab.training.data_module import DataModule, Objective

NAME = "algorithm"


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Options of training on algorithms."""

    algorithm: Literal["copy", "reverse", "addition", "parity"] = "copy"
    """What is computed: 407=407, 407=704, 407+950=592 (the lowest digit first), or of bits 0110=0."""
    digits: str = "1-20"
    """How many digits a problem has, one of this range, both ends included; of an addition each number. Rows are as
    long as the longest problem and its answer; `length` is the most that they may take."""

    def __post_init__(self) -> None:
        least, dash, most = self.digits.partition("-")
        fine = least.isdecimal() and (most.isdecimal() if dash else not most)
        if not fine or not 1 <= int(least) <= int(most or least):
            raise KinformerError(f"`digits` {self.digits}: is no range of numbers from 1; write as in 1-20.")

    @property
    def data(self) -> AlgorithmData:
        """Return the rows that these options describe."""
        from kinformer.lab.data.algorithms import AlgorithmData

        least, _, most = self.digits.partition("-")
        return AlgorithmData(algorithm=self.algorithm, least=int(least), most=int(most or least))


@dataclass(frozen=True, kw_only=True)
class AlgorithmEvaluationOptions(PredictionTable):
    """Options of evaluating algorithms."""

    at_digits: str | None = None
    """Measure problems of these numbers of digits, as in 10,20,40, instead of up to four times training's longest."""
    problems: int = 256
    """How many problems of each number of digits are measured."""

    def __post_init__(self) -> None:
        require("problems", self.problems, 1)
        if self.at_digits is not None:
            lengths_of(self.at_digits)
        super().__post_init__()

    @property
    def digits_to_measure(self) -> tuple[int, ...] | None:
        """Return the numbers of ``at_digits``."""
        return None if self.at_digits is None else lengths_of(self.at_digits)


def lengths_of(text: str) -> tuple[int, ...]:
    """Return ``"10,20"`` as distinct numbers of digits, in order."""
    return whole_numbers("`at_digits`", text, "digits", "10,20,40")


def _answers(model: nn.Module) -> Objective:
    from kinformer.lab.tasks.algorithm.work import AlgorithmLoss

    return AlgorithmLoss()


class Algorithm(Task):
    """Accuracy per token of the answers and per problem, by the number of digits."""

    name = NAME
    title = "algorithm"
    description = (
        "Learns an algorithm on digits (copy, reverse, addition, parity) from problems of lengths drawn from a range. "
        "Measured by the share of answers' tokens that are right and of problems that are solved, by length, up to "
        "four times the longest of training."
    )
    models = Models(protocols=(CausalModel,), inputs=("tokens",))
    data = DataNeeds(
        default=NAME,
        refused=dict.fromkeys(
            ("data", "holdout", "tokenizer", "train_tokenizer"), "an algorithm makes its own problems; leave it out."
        ),
    )
    evaluation = EvaluationNeeds(
        refused=dict.fromkeys(
            ("data", "max_bytes"), "an algorithm makes its own problems; give `problems` and `at_digits`."
        )
    )
    generation = Generation(reads=(), unread="a problem has one answer, the most probable")
    prediction = Prediction(reads=("text_field", "label_field", "format"))
    metrics = (ACCURACY, SEQUENCE_ACCURACY, BITS_PER_LABEL)
    objectives = {"answers": _answers}
    Options = AlgorithmOptions
    EvaluationOptions = AlgorithmEvaluationOptions

    def open(self, source: Source, options: AlgorithmOptions, cache: Path | None = None) -> AlgorithmData:
        return options.data

    def vocab_size(self, data: AlgorithmData) -> int:
        from kinformer.lab.data.algorithms import SYMBOLS

        return len(SYMBOLS)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.shared.text import check_ids, check_sequence

        check_ids(plan, self.vocab_size(plan.data), special_apart=False)
        check_sequence(model)
        plan.data.check(plan.settings.length)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.tasks.algorithm.work import AlgorithmModule

        return AlgorithmModule(plan.data, plan.settings)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: AlgorithmEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.algorithm.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self,
        subject: LoadedRun,
        prompt: str | bytes,
        options: GenerationSettings,
        write: Callable[[str], None] | None,
    ) -> Generated:
        from kinformer.lab.tasks.algorithm.work import answer

        return answer(subject, prompt, options.seed, write)

    def predict(
        self, subject: LoadedRun, source: TextSource, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.algorithm.work import answer, problem_in
        from kinformer.lab.tasks.shared.answers import answers_to

        return answers_to(source, settings, problem_in, subject, answer)


TASK = Algorithm()
