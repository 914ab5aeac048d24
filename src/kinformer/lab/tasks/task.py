"""The record of a task: the objective of a model, the data that it learns from, and the metrics that measure it.

``table.py`` holds the records of Kinformer's tasks as data. A record names its functions, such as ``"mae:evaluate"``,
and a function's module is imported when the function is called. So records are read without importing PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    Evaluation,
    EvaluationReport,
    EvaluationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    TrainedRun,
)
from kinformer.lab.tasks.evaluation import GenerationSettings as GenerationSettings
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

# The parts of a task's record: its models, its data, and the options that evaluating, predicting and generating read.


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that can be trained for a task.

    ``protocols`` are their protocols (``core.model``), the usual one first, and ``inputs`` the kinds of their inputs,
    such as tokens; None stands for any. With ``from_tokens``, ``Task.fit`` replaces an input of tokens by one of
    ``inputs``. ``made_for`` names the input and the head of models that were made for the task, as in
    ``{"head": "ctc"}``.
    """

    protocols: tuple[type, ...]
    inputs: tuple[str, ...] | None = None
    from_tokens: bool = False
    made_for: Mapping[str, str] = field(default_factory=dict)

    def fit(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` was made for the task: nothing in it must be replaced."""
        if any(getattr(config, name).kind != kind for name, kind in self.made_for.items()):
            return False
        return self.take(config) if self.made_for else self._read(config)

    def take(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` can be trained for the task, perhaps with another input."""
        if self.from_tokens and config.input.kind == "tokens":
            return config.protocol in self.protocols
        return self._read(config)

    def _read(self, config: ModelConfig) -> bool:
        return config.protocol in self.protocols and (self.inputs is None or config.input.kind in self.inputs)


@dataclass(frozen=True, kw_only=True)
class DataNeeds:
    """The data that a task learns from.

    ``default`` names the data of a run that does not name any. None means that a run must name data, and ``missing``
    then says in one sentence which. With ``tokenized``, a tokenizer turns the data into ids. With ``columns``, the task
    itself reads the column of its tables that `text_field` names. With ``running_text``, a row may be any part of the
    text, so that ``minutes`` also decide the vocabulary. ``lines`` holds groups of fields of JSON lines: lines with one
    of these groups choose the task where the user names none. ``refused`` holds general options of training that mean
    nothing to the task, each with the reason and the remedy.
    """

    default: str | None = None
    missing: str = "the task needs data; give `data` PATH."
    tokenized: bool = False
    columns: bool = False
    running_text: bool = False
    lines: tuple[tuple[str, ...], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


NOTHING_DRAWN = "nothing is drawn at random in an evaluation of this task; leave it out."
"""Why an evaluation refuses a seed."""


@dataclass(frozen=True, kw_only=True)
class EvaluationNeeds:
    """The general options (``EvaluationSettings``) that evaluating refuses, each with the reason and the remedy."""

    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The general options of predicting that a task ``reads``, out of ``PREDICTING``.
    The other options are refused. For a task without predictions, ``refusal`` gives the reason as a whole clause;
    otherwise it is None."""

    reads: tuple[str, ...] = ()
    refusal: str | None = None


PREDICTING = ("top_k", "text_field", "label_field", "format", "batch_size", "skip_bad")
"""The general options of predicting: how items are read, and which facts of each item are printed."""
OF_TEXTS = ("text_field", "label_field", "format", "batch_size", "skip_bad")
"""The options that a task of texts reads."""


DRAWING = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "samples", "chunk",
    "draft", "draft_length",
)  # fmt: skip
"""The general options of drawing."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The prompt and the general options of generating.

    ``prompt`` is a text, lines that come one by one, or None. ``temperature`` is the default temperature. ``reads``
    names the options of ``DRAWING`` that the task reads; the other options are refused, and ``unread`` gives the
    reason: "a key has one answer, the most probable". For a task that does not generate, ``refusal`` gives the reason
    as a whole clause: "it reads whole texts; give a run of a causal member"; otherwise it is None.
    """

    prompt: Literal["text", "lines"] | None = "text"
    temperature: float = 0.8
    reads: tuple[str, ...] = DRAWING
    unread: str = ""
    refusal: str | None = None


EMBEDDING = "next-token, instruct, mlm, classify, listops, vision, dino, mae, mpp or speech"
"""The tasks whose runs make vectors."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The empty options of a task."""


class Source(NamedTuple):
    """Where data comes from: ``spec`` names it, ``holdout`` is the share held out, ``tokenizer`` makes ids of text,
    ``text_field`` names the column of text for a task with ``data.columns``, ``by_user`` holds the names of the task's
    options that the user gives in this call; the others are from a run folder, which may be a stranger's. ``base`` is
    the run to begin with, or the run itself: its chat template writes conversations."""

    spec: str
    holdout: float | None
    tokenizer: Tokenizer | None
    text_field: str | None = None
    by_user: frozenset[str] = frozenset()
    base: TrainedRun | None = None


class Data(Protocol):
    """Opened data. ``identity`` is the record that a run stores about the data, as values for JSON; ``fingerprint``
    tells the data from other data."""

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


class Later:
    """A function named ``"page:function"``, a module beside this file, which is imported when it is called."""

    def __init__(self, place: str) -> None:
        self.place = place

    def load(self) -> Any:
        """Return what the place names."""
        page, _, name = self.place.partition(":")
        return getattr(import_module(f"{__package__}.{page}"), name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.load()(*arguments, **named)


TEXTS = ("name", "title", "description", "advice", "use")
"""The fields of a record whose strings are texts, not names of functions."""


class Task:
    """The record of a task.

    ``name`` is the value of ``--task``; ``title`` and ``description`` are for people. ``models``, ``data``,
    ``evaluation``, ``generation`` and ``prediction`` state which models the task takes, which data it needs, and which
    options the commands read. ``objectives`` maps names to functions that return an objective for a model; the first
    is the usual one. ``metrics`` are the metrics of an evaluation; the first decides which weights are the best.
    ``settings`` are the settings of training that differ from the general defaults, and ``in_minutes`` the settings and
    own options of a run that ``minutes`` limit (see ``lab.runs.minutes``). ``rivals`` names in words the baselines that
    a model should beat (None: every baseline of an evaluation), and ``advice`` says what to try where it does not.
    ``use`` is the command, beside evaluate, that training names at its end, with ``{}`` for the folder of the run.
    ``Options``, ``EvaluationOptions``, ``GenerationOptions`` and ``PredictionOptions`` are dataclasses of options that
    only this task has.

    A task of one's own is a subclass with attributes and methods. Kinformer's records are instances of this class:
    ``Task(name="mae", fit="mae:fitted_to_masks", ...)`` gives the record the function in place of the method, and the
    function takes the method's arguments without ``self``. A named function in ``objectives`` also takes the rows of
    training, or None; a named class is made by its ``of(model, rows)``, or without arguments.
    """

    name: str
    title: str
    description: str
    models: Models
    data: DataNeeds = DataNeeds()
    evaluation: EvaluationNeeds = EvaluationNeeds()
    generation: Generation = Generation(refusal="the task generates nothing; give a run of another task.")
    prediction: Prediction = Prediction(refusal="the task predicts nothing; give a run of another task.")
    objectives: Mapping[str, Callable[..., Objective]]
    metrics: tuple[Metric, ...]
    settings: Mapping[str, float | str] = {}
    in_minutes: Mapping[str, Any] = {}
    rivals: Mapping[str, str] | None = None
    advice: str = "train for longer, or on more data"
    use: str = ""
    Options: type = NoOptions
    EvaluationOptions: type = NoOptions
    GenerationOptions: type = NoOptions
    PredictionOptions: type = NoOptions

    def __init__(self, *, objectives: Mapping[str, str] | None = None, **fields: Any) -> None:
        for name, value in fields.items():
            assert hasattr(Task, name) or name in Task.__annotations__, name
            setattr(self, name, Later(value) if isinstance(value, str) and name not in TEXTS else value)
        if objectives is not None:
            self.objectives = {name: Later(function) for name, function in objectives.items()}

    def derive(self, **fields: Any) -> Task:
        """Return a copy of the record with other ``fields``."""
        record = copy(self)
        record.__init__(**fields)  # type: ignore[misc]
        return record

    def takes(self, config: ModelConfig) -> bool:
        """Return whether models of ``config`` can be trained for this task."""
        return self.models.take(config)

    def suits(self, config: ModelConfig) -> bool:
        """Return whether :meth:`takes` and :meth:`check` accept ``config``; then lists of members name the task."""
        return self.takes(config)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether a model of ``config`` was made for this task."""
        return self.models.fit(config)

    def names(self, spec: str) -> bool:
        """Return whether ``spec`` names data other than a file."""
        return False

    def open(self, source: Source, options: Any, cache: Path | None = None) -> Data:
        """Return the data that ``source`` names."""
        raise NotImplementedError

    def default_vocabulary(self, source: Source, options: Any) -> int | None:
        """Return how many tokens a new tokenizer for this data should have where none is named; None means bytes."""
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

    def row_lengths(self, data: Any, config: ModelConfig) -> Any:
        """Return how many positions training rows take as whole, int [rows]; None where :meth:`length` decides, or
        where every length suits the data."""
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
        make = self.objectives[self.choose_objective(name)]
        if not isinstance(make, Later):
            return make(model)
        made = make.load()
        return getattr(made, "of", made)(model, data) if not isinstance(made, type) or hasattr(made, "of") else made()

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

    def beside(self, metric: Metric, baselines: Mapping[str, float]) -> str:
        """Return the ``baselines`` that a model should beat in words."""
        return ", ".join(f"{self._rival(name)} ({metric.text(value)})" for name, value in baselines.items())

    def _rival(self, name: str) -> str:
        """Return the baseline ``name`` in words."""
        return (self.rivals or {}).get(name, name.replace("_", " "))

    def verdict(self, metric: Metric | None, value: float, baselines: Mapping[str, float]) -> str | None:
        """Return a sentence if ``value`` is not better than the best of the ``baselines`` that the model should beat:
        it names both and says what to try. Return None otherwise."""
        rivals = (
            baselines if self.rivals is None else {name: baselines[name] for name in self.rivals if name in baselines}
        )
        if metric is None or not rivals or not isfinite(value):
            return None
        name, best = (min if metric.lower_is_better else max)(rivals.items(), key=lambda pair: pair[1])
        perfect = value == best == (0.0 if metric.lower_is_better else 1.0)
        if metric.better(value, best) or perfect:
            return None
        return f"{metric.text(value)} is not better than {self._rival(name)} ({metric.text(best)}); {self.advice}"

    def evaluate(
        self, runs: Sequence[TrainedRun], load: Load, settings: EvaluationSettings, options: Any, quiet: bool = True
    ) -> EvaluationReport:
        """Measure runs, one by one unless the task compares them, with the task's own ``options``.
        ``load`` gives a run its model; one model at a time is in memory."""
        return EvaluationReport([self.measure(load(run), settings, options, quiet) for run in runs])

    def measure(self, subject: LoadedRun, settings: EvaluationSettings, options: Any, quiet: bool) -> Evaluation:
        """Measure one run beside the task's baselines."""
        raise NotImplementedError

    def check_generation(self, run: TrainedRun) -> None:
        """Raise a :class:`KinformerError` where this task, or this run of it, generates nothing."""
        if self.generation.refusal is not None:
            raise KinformerError(
                f"{run.folder}: is a run of {run.member!r} for the task {self.name}; {self.generation.refusal}"
            )

    def generate(self, subject: LoadedRun, prompt: Any, options: Any, write: Callable[[str], None] | None) -> Any:
        """Generate from ``prompt``, after :meth:`check_generation`; the type of the result depends on the task."""
        raise NotImplementedError

    def predict(
        self, subject: LoadedRun, source: Any, settings: PredictionSettings, options: Any
    ) -> Iterator[Predicted]:
        """Yield the predictions of the items of ``source`` (a path, "-", or a list of items), in their order; the task
        has a ``prediction`` without a refusal."""
        raise NotImplementedError

    def samples(self, run: TrainedRun, model: CausalModel, options: CalibrateOptions) -> Samples:
        """Return samples of what ``model``, the model of ``run``, writes with early exits and without."""
        raise KinformerError(
            f"{run.folder}: was trained for the task {self.name}, which writes no text; give a run of next-token or "
            "translate, or thresholds by hand, by `set` stack.rule.thresholds."
        )

    def embed(self, subject: LoadedRun, source: Any, settings: EmbeddingSettings) -> Iterator[Embedded]:
        """Yield the vectors of the items of ``source`` (a path, "-", or a list), in their order."""
        raise KinformerError(
            f"{subject.run.folder}: is a run of the task {self.name}, which makes no vectors; give one of {EMBEDDING}."
        )
