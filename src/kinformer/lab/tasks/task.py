"""The record of a task: what a model is trained for, on which data, and by which metrics it is measured.

Each folder beside this file holds one record, a :class:`Task`, and ``table.py`` lists them. Records are read without
importing PyTorch; their methods import what computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    Evaluation,
    EvaluationReport,
    EvaluationSettings,
    Predicted,
    PredictionSettings,
)
from kinformer.lab.tasks.runs import LoadedRun, TrainedRun
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.model import CausalModel
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.calibration.options import CalibrateOptions
    from kinformer.lab.calibration.risk import Samples
    from kinformer.lab.data import Tokenizer
    from kinformer.lab.training.data_module import DataModule, Objective
    from kinformer.lab.training.settings import Settings

# The parts of a task's record: which models it takes, which data it needs, what evaluating and predicting read, and
# what generating means.


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that can be trained for a task.

    They have one of the ``protocols`` (``core.model``; the usual one first) and one of the kinds of ``inputs``, such as
    tokens; None stands for any. With ``from_tokens``, ``Task.fit`` gives models of tokens such an input.
    """

    protocols: tuple[type, ...]
    inputs: tuple[str, ...] | None = None
    from_tokens: bool = False

    def fit(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` has one of the protocols and inputs, as it is."""
        return config.protocol in self.protocols and (self.inputs is None or config.input.kind in self.inputs)

    def take(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` has them, or the task gives it such an input."""
        reads_ids = self.from_tokens and config.input.kind == "tokens"
        return self.fit(config) or (reads_ids and config.protocol in self.protocols)


@dataclass(frozen=True, kw_only=True)
class DataNeeds:
    """The data that a task learns from.

    ``default`` is what it learns from where none is named; None means that some must be, and ``missing`` then says in
    one sentence what to give. A tokenizer makes ids of it where ``tokenized``. With ``columns`` the task itself reads
    the column of its tables that `text_field` names. In ``running_text`` a row may be any
    part, so that ``minutes`` alone decide sizes and recipe. ``refused`` are general options of training that mean
    nothing to the task, each with the reason and the remedy.
    """

    default: str | None = None
    missing: str = "the task needs data; give `data` PATH."
    tokenized: bool = False
    columns: bool = False
    running_text: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)


NOTHING_DRAWN = "nothing is drawn at random in an evaluation of this task; leave it out."
"""Why an evaluation refuses a seed."""


@dataclass(frozen=True, kw_only=True)
class EvaluationNeeds:
    """What evaluating reads: all general options (``EvaluationSettings``) but the ``refused``, each of
    which has the reason and the remedy."""

    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What predicting takes: the general options that it ``reads``, of those in ``PREDICTING``.

    The others are refused. ``refusal`` says of a task that predicts nothing why, as a whole clause; None where it does.
    """

    reads: tuple[str, ...] = ()
    refusal: str | None = None


PREDICTING = ("top_k", "text_field", "label_field", "format", "batch_size")
"""The general options of predicting that say how items are read and what is said of each."""
OF_TEXTS = ("text_field", "label_field", "format", "batch_size")
"""Those that a task reads whose items are texts."""


DRAWING = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "samples", "chunk",
    "draft", "draft_length",
)  # fmt: skip
"""The general options of generating that say what is drawn, and how."""


class GenerationSettings(Protocol):
    """The general options of generating as a task gets them, where seed and temperature were decided; ``task_options``
    are those that only the task has."""

    @property
    def max_new_tokens(self) -> int | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def samples(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def draft_length(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def quiet(self) -> bool: ...
    @property
    def task_options(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What generating takes: a prompt of ``text``, of ``lines``, one by one as they come, or None.

    ``temperature`` is the usual one. ``reads`` are the options of drawing, of those in ``DRAWING``, that it reads; the
    others are refused, and ``unread`` says why: "a key has one answer, the most probable". ``refusal`` says of a task
    that generates nothing why, as a whole clause: "it reads whole texts; give a run of a causal member"; None where it
    generates.
    """

    prompt: Literal["text", "lines"] | None = "text"
    temperature: float = 0.8
    reads: tuple[str, ...] = DRAWING
    unread: str = ""
    refusal: str | None = None


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
    ``text_field`` names the column of text for a task with ``data.columns``, ``by_user`` holds the names of the task's
    options that the user gives in this call; the others are from a run folder, which may be a stranger's."""

    spec: str
    holdout: float | None
    tokenizer: Tokenizer | None
    text_field: str | None = None
    by_user: frozenset[str] = frozenset()


class Data(Protocol):
    """Opened data. ``identity`` is what a run stores about it, as values for JSON; ``fingerprint`` tells it from other
    data."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def identity(self) -> dict[str, object]: ...


class TrainingPlan(NamedTuple):
    """The plan of a run: the model's config, the data, the settings of training and the task's own options."""

    config: ModelConfig
    data: Any
    settings: Settings
    options: Any
    tokenizer: Tokenizer | None


Load = Callable[[TrainedRun], LoadedRun]


class Task:
    """A task's record. A task narrows the types of its own options, data and models where this base says ``Any``.

    ``name`` is that of ``--task``; ``title`` and ``description`` are for people. ``models``, ``data``, ``evaluation``
    and ``generation`` say which models it takes, which data it needs, which options evaluating reads, and what
    generating and predicting take (see ``lab.tasks.task``). ``objectives`` are what can be minimised for it, by name,
    the usual one first, each made for a model. ``metrics`` are what it is evaluated by; the first decides which
    weights are the best. ``settings`` are those of training that differ from the general defaults. ``Options``,
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
    objectives: ClassVar[Mapping[str, Callable[[Any], Objective]]]
    metrics: ClassVar[tuple[Metric, ...]]
    settings: ClassVar[Mapping[str, float | str]] = {}
    Options: ClassVar[type] = NoOptions
    EvaluationOptions: ClassVar[type] = NoOptions
    GenerationOptions: ClassVar[type] = NoOptions
    PredictionOptions: ClassVar[type] = NoOptions

    @property
    def figures(self) -> tuple[Metric, ...]:
        """An alias of ``metrics``: those that the task measures."""
        return self.metrics

    def takes(self, config: ModelConfig) -> bool:
        """Return whether models of ``config`` can be trained for this task."""
        return self.models.take(config)

    def suits(self, config: ModelConfig) -> bool:
        """Return whether :meth:`check` accepts models of ``config``, too; if so, lists of members name the task."""
        return self.takes(config)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config``, as it is, was made for this task."""
        return self.models.fit(config)

    def names(self, spec: str) -> bool:
        """Return whether ``spec`` names data that is no file."""
        return False

    def open(self, source: Source, options: Any, cache: Path | None = None) -> Data:
        """Return the data that ``source`` names."""
        raise NotImplementedError

    def default_vocabulary(self, source: Source, options: Any) -> int | None:
        """Return how many tokens a tokenizer trained for this data should have where none is named; None means
        bytes."""
        return None

    def texts(self, source: Source, options: Any) -> Iterable[str]:
        """Return the texts that a new tokenizer learns from: the training split."""
        from kinformer.lab.data import open_corpus
        from kinformer.lab.data.tokenizer import texts_of

        return texts_of(open_corpus(source.spec, holdout=source.holdout).splits["train"])

    def vocab_size(self, data: Any) -> int | None:
        """Return how many ids a new model must know, special ones included; None where it reads no ids."""
        return None

    def fit(self, config: ModelConfig, data: Any) -> dict[str, object]:
        """Return the overrides that make ``config`` fit the task and its data (None: not opened yet)."""
        return {}

    def requested(self, config: ModelConfig, data: Any, options: Any) -> dict[str, object]:
        """Return the overrides of the fitted ``config`` that the task's own ``options`` ask for."""
        return {}

    def length(self, data: Any, config: ModelConfig) -> int | None:
        """Return how many positions a row has, where the data decide it; None where --length does."""
        return None

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        """Raise a :class:`KinformerError` where the model, on the meta device, cannot be trained as planned."""

    def tell(self, plan: TrainingPlan) -> None:
        """Note what training reads of the data, at its start."""

    def data_module(self, plan: TrainingPlan) -> DataModule:
        """Return the rows to train on and to validate with."""
        raise NotImplementedError

    def objective(self, name: str | None, model: Any, data: Any = None) -> Objective:
        """Return the objective called ``name``, or the usual one, for ``model`` on ``data``."""
        return self.objectives[self.choose_objective(name)](model)

    def choose_objective(self, name: str | None, preferred: str | None = None) -> str:
        """Return ``name`` if it is one of the objectives; where it is None, the ``preferred`` or the usual one."""
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
        """Measure runs, one by one unless the task compares them, with the task's own ``task_options``.

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
        """Generate from ``prompt``, after :meth:`check_generation`; what is returned depends on the task."""
        raise NotImplementedError

    def predict(
        self, subject: LoadedRun, source: Any, settings: PredictionSettings, task_options: Any
    ) -> Iterator[Predicted]:
        """Yield the predictions of the items of ``source`` (a path, "-", or a list of items), in their order; the task
        has a ``prediction`` without a refusal."""
        raise NotImplementedError

    def samples(self, run: TrainedRun, model: CausalModel, options: CalibrateOptions) -> Samples:
        """Return samples of what ``model``, the model of ``run``, writes with early exits and without.

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
