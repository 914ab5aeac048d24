"""Next token: a causal model foretells every token of a text from those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinformer.core.errors import KinformerError, require
from kinformer.core.figure import Figure
from kinformer.core.model import CausalModel
from kinformer.tasks.task import Load, Measuring, Report, Source, Subject, Task, TrainedRun, TrainingPlan

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.data import Corpus
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective

BITS_PER_BYTE = Figure("bits_per_byte", "bits per byte")


@dataclass(frozen=True, kw_only=True)
class NextTokenOptions:
    """Of models of the next token."""

    segments: bool = False
    """Train on consecutive segments of --length tokens: the state is carried from one to the next, gradients not."""


@dataclass(frozen=True, kw_only=True)
class NextTokenMeasuring:
    """Of models of the next token."""

    context: str | None = None
    """Measure in windows of N tokens, or with the state carried from end to end (N or "carried"). If not given, as it
    was trained: carried after training with --segments, else in windows of the training length."""
    overlap: float = 0.0
    """The share of each window that repeats the one before and is not scored again."""
    lengths: str | None = None
    """Also measure in windows of each of these lengths and by position within them, as in 128,512,2048, or 1x,4x,16x
    for multiples of the training length. A length beyond a model's positions is left out."""
    plot: str | None = None
    """Draw what --lengths, --recl or --datastore measured, as PNG or SVG by the ending of this name."""
    recl: bool = False
    """Measure the relative effective context length of a group of runs instead; --lengths are the contexts tried."""
    hardest: float = 0.1
    """With --recl: the share of tokens that count, those that the shorter context explains least."""
    positions: int = 512
    """With --recl: how many tokens are predicted, evenly spread, each anew at every context."""
    holdout: float | None = None
    """Take the last share of the data for validation and test, instead of the run's."""
    baseline: bool = False
    """Also count 5-grams of the training split and measure their prediction."""

    def __post_init__(self) -> None:
        require("--positions", self.positions, 1)


def _next_token(model: Any) -> Any:
    from kinformer.tasks.next_token_rows import NextTokenLoss

    return NextTokenLoss()


def _deep_supervision(model: Any) -> Any:
    from kinformer.tasks.deep_supervision import DeepSupervision

    return DeepSupervision.of(model)


class NextToken(Task):
    """Bits per byte, whatever the tokenizer, so that models with unlike ones compare."""

    name = "next-token"
    title = "next token"
    description = (
        "Learns to foretell every token of a text from those before it, and continues texts. Judged in bits per byte "
        "of held-out text, beside a 5-gram model."
    )
    does = "predicts next tokens"
    protocol = CausalModel
    figures = (BITS_PER_BYTE,)
    objectives = {"next-token": _next_token, "deep-supervision": _deep_supervision}
    Options = NextTokenOptions
    MeasuringOptions = NextTokenMeasuring
    default_data = "stdlib"
    tokenizes = True

    def open(self, source: Source, options: NextTokenOptions, cache: Path | None = None) -> Corpus:
        from kinformer.data import open_corpus

        return open_corpus(source.spec, cache=cache, tokenizer=source.tokenizer, holdout=source.holdout)

    def vocab_size(self, data: Corpus) -> int:
        return data.tokenizer.vocab_size

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.text import check_ids, check_long_enough, check_sequence

        check_ids(plan, self.vocab_size(plan.data), special_apart=False)
        check_sequence(model)
        if plan.options.segments:
            _check_endless(model)
        rows = plan.settings.batch_size if plan.options.segments else 1
        check_long_enough(plan.data, rows, plan.settings.length)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.tasks.next_token_rows import NextTokens

        return NextTokens(plan.data, plan.settings, plan.options.segments)

    def objective(self, name: str | None, model: nn.Module, data: DataModule | None = None) -> Objective:
        from kinformer.tasks.retrieved import RetrievedNextToken, RetrievedTokens

        if isinstance(data, RetrievedTokens) and self.choose_objective(name) == "next-token":
            return RetrievedNextToken()
        return super().objective(name, model, data)

    def evaluate(
        self, runs: Sequence[TrainedRun], load: Load, measuring: Measuring, own: NextTokenMeasuring, quiet: bool = True
    ) -> Report:
        from kinformer.tasks.next_token_measure import evaluate

        return evaluate(runs, load, measuring, own, quiet)

    def check_generation(self, run: TrainedRun) -> None:
        pass

    def generate(self, subject: Subject, prompt: Any, options: Any, write: Callable[[str], None] | None) -> Any:
        from kinformer.tasks.next_token_generate import continue_text

        return continue_text(subject, prompt, options, write)


def _check_endless(model: Any) -> None:
    """A state that is carried through the whole corpus must not grow with it."""
    if model.max_length is not None:
        raise KinformerError(
            f"--segments: the state goes on without end, but this model's positions end at {model.max_length}; choose "
            "another member, or another position such as --set position=sinusoidal."
        )
    if any(getattr(module, "growth", "") == "linear" for module in model.modules()):
        raise KinformerError(
            "--segments: the state goes on without end, but this model's grows with every token; choose another "
            'member, or bound it, as --set \'layers.*.mixer.pattern={"kind": "local", "window": 256}\' does.'
        )


TASK = NextToken()
