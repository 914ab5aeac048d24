"""What a task is: what a model is trained for, on which data, and by which figures it is measured.

A page of this folder holds one record, a :class:`Task`, and ``table.py`` lists the pages. Records are read without
importing PyTorch; what computes is imported by the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from kinformer.runtime.errors import KinformerError
from kinformer.tasks.evaluation import Evaluation, EvaluationReport, EvaluationSettings
from kinformer.tasks.predictions import Embedded, EmbeddingSettings, Predicted, PredictionSettings
from kinformer.tasks.record import DataNeeds, EvaluationNeeds, Generation, Models, Prediction
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.training.metric import Metric

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import Tokenizer
    from kinformer.evaluation.exit_samples import Samples, Sampling
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective
    from kinformer.training.settings import Settings


SPECIAL_TOKENS = 3
"""Ids that a new encoder has for itself: a mask, BOS and EOS."""
EMBEDDING = "next-token, mlm, classify, listops, vision, dino, mae, mpp or speech"
"""The tasks whose runs make vectors."""
READS_WHOLE_TEXTS = "its encoder reads whole texts and continues none; give a run of a causal member."


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """A task without options of its own."""


class Source(NamedTuple):
    """Where data comes from: ``spec`` names it, ``holdout`` is the share held out, ``tokenizer`` makes ids of text,
    ``text_field`` names the column of text for a task with ``data.columns``."""

    spec: str
    holdout: float | None
    tokenizer: Tokenizer | None
    text_field: str | None = None


class Data(Protocol):
    """Opened data. ``identity`` is what a run keeps of it, plain enough for JSON; ``fingerprint`` distinguishes it from
    other."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def identity(self) -> dict[str, Any]: ...


class TrainingPlan(NamedTuple):
    """What a run is going to be: a model's config, the data, the settings, the task's own options."""

    config: Any
    data: Any
    settings: Settings
    options: Any
    tokenizer: Tokenizer | None


Load = Callable[[TrainedRun], LoadedRun]


class Task:
    """A task's record.

    ``name`` is that of ``--task``; ``title`` and ``description`` are for people. ``models``, ``data``, ``evaluation``
    and ``generation`` say which models it takes, which data it needs, which options evaluating reads, and what
    generating and predicting take (see ``tasks.record``). ``objectives`` are what can be minimised for it, by name, the
    usual one first, each made for a model. ``metrics`` are what it is evaluated by; the first decides which weights are
    the best. ``settings`` are those of training that differ from the general defaults. ``Options``,
    ``EvaluationOptions``, ``GenerationOptions`` and ``PredictionOptions`` are dataclasses of options that only this
    task has.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    models: ClassVar[Models]
    data: ClassVar[DataNeeds] = DataNeeds()
    evaluation: ClassVar[EvaluationNeeds] = EvaluationNeeds()
    generation: ClassVar[Generation] = Generation(refusal="the task generates nothing; give a run of another task.")
    prediction: ClassVar[Prediction] = Prediction(refusal="the task predicts nothing; give a run of another task.")
    objectives: ClassVar[Mapping[str, Callable[[Any], Any]]]
    metrics: ClassVar[tuple[Metric, ...]]
    settings: ClassVar[Mapping[str, Any]] = {}
    Options: ClassVar[type] = NoOptions
    EvaluationOptions: ClassVar[type] = NoOptions
    GenerationOptions: ClassVar[type] = NoOptions
    PredictionOptions: ClassVar[type] = NoOptions

    @property
    def figures(self) -> tuple[Metric, ...]:
        """An alias of ``metrics``: those that the task measures."""
        return self.metrics

    def takes(self, config: ModelConfig) -> bool:
        """Whether models of ``config`` can be trained for this task."""
        return self.models.take(config)

    def suits(self, config: ModelConfig) -> bool:
        """Whether :meth:`check` accepts models of ``config``, too: of which member lists name the task."""
        return self.takes(config)

    def fits(self, config: ModelConfig) -> bool:
        """Whether a model of ``config``, as it is, was made for this task."""
        return self.models.fit(config)

    def names(self, spec: str) -> bool:
        """Whether ``spec`` names data that is no file."""
        return False

    def open(self, source: Source, options: Any, cache: Path | None = None) -> Data:
        """The data that ``source`` names."""
        raise NotImplementedError

    def default_vocabulary(self, source: Source, options: Any) -> int | None:
        """How many tokens a tokenizer that is trained for this data should have where none is named; None: bytes."""
        return None

    def texts(self, source: Source, options: Any) -> Iterable[str]:
        """What a tokenizer of its own learns from: the text to train on."""
        from kinformer.data import open_corpus
        from kinformer.data.tokenizer import texts_of

        return texts_of(open_corpus(source.spec, holdout=source.holdout).splits["train"])

    def vocab_size(self, data: Any) -> int | None:
        """How many ids a new model must know, special ones included; None where it reads no ids."""
        return None

    def fit(self, config: Any, data: Any | None) -> dict[str, Any]:
        """Overrides that make ``config`` fit the task and its data (None: not opened yet), as plain data."""
        return {}

    def requested(self, config: Any, data: Any | None, options: Any) -> dict[str, Any]:
        """Overrides of the fitted ``config`` that the task's own ``options`` ask for, as plain data."""
        return {}

    def length(self, data: Any, config: Any) -> int | None:
        """How many positions a row has, where the data decide it; None where --length does."""
        return None

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        """Raise a :class:`KinformerError` where the model, which is on the meta device, cannot be trained as
        planned."""

    def data_module(self, plan: TrainingPlan) -> DataModule:
        """The rows to train on and to validate with."""
        raise NotImplementedError

    def objective(self, name: str | None, model: nn.Module, data: DataModule | None = None) -> Objective:
        """The objective called ``name``, or the usual one, for ``model`` on ``data``."""
        return self.objectives[self.choose_objective(name)](model)

    def choose_objective(self, name: str | None, preferred: str | None = None) -> str:
        """``name`` if it is one of the objectives; without it the ``preferred`` one, or the usual one."""
        names = list(self.objectives)
        if name is None:
            return preferred if preferred in names else names[0]
        if name not in names:
            raise KinformerError(
                f"`objective` {name}: cannot be minimised for the task {self.name}; choose {' or '.join(names)}, or "
                "leave it out."
            )
        return name

    def evaluate(
        self,
        runs: Sequence[TrainedRun],
        load: Load,
        evaluation_settings: EvaluationSettings,
        task_options: Any,
        quiet: bool = True,
    ) -> EvaluationReport:
        """Measure runs, one by one unless the task compares them; ``task_options`` are its own options.

        ``load`` gives a run its model; one model at a time is in memory.
        """
        return EvaluationReport([self.measure(load(run), evaluation_settings, task_options, quiet) for run in runs])

    def measure(
        self, subject: LoadedRun, evaluation_settings: EvaluationSettings, task_options: Any, quiet: bool
    ) -> Evaluation:
        """Measure one run beside the task's baselines."""
        raise NotImplementedError

    def check_generation(self, run: TrainedRun) -> None:
        """Raise a :class:`KinformerError` where this task, or this run of it, generates nothing."""
        if self.generation.refusal is not None:
            raise KinformerError(
                f"{run.folder}: is a run of {run.member!r} for the task {self.name}; {self.generation.refusal}"
            )

    def generate(self, subject: LoadedRun, prompt: Any, options: Any, write: Callable[[str], None] | None) -> Any:
        """What generating means, after :meth:`check_generation`."""
        raise NotImplementedError

    def predict(
        self, subject: LoadedRun, source: Any, settings: PredictionSettings, task_options: Any
    ) -> Iterator[Predicted]:
        """The predictions of the items of ``source`` (a path, "-", or a list of items), in their order and one by one;
        the task has a ``prediction`` without a refusal."""
        raise NotImplementedError

    def samples(self, run: TrainedRun, model: Any, sampling: Sampling) -> Samples:
        """Return samples of what ``model``, that of ``run``, writes with early exits and without.

        Errors: ``KinformerError`` for a task whose models write nothing token by token.
        """
        raise KinformerError(
            f"{run.folder}: was trained for the task {self.name}, which writes no text; give a run of next-token or "
            "translate, or thresholds by hand, by `set` stack.rule.thresholds."
        )

    def embed(self, subject: LoadedRun, source: Any, settings: EmbeddingSettings) -> Iterator[Embedded]:
        """Yield the vectors of the items of ``source`` (a path, "-", or a list), in their order.

        Errors: ``KinformerError`` for a task whose models read neither text, images nor sound.
        """
        raise KinformerError(
            f"{subject.run.folder}: is a run of the task {self.name}, which makes no vectors; give one of {EMBEDDING}."
        )
