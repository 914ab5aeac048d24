"""The plan of a comparison: every contestant has the same data, order, recipe and parameter budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kinformer import __version__
from kinformer.core.config import override, to_dict
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure, storable
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.lab.comparison.options import CompareOptions, parse_spec
from kinformer.lab.comparison.record import EntrantRecord, FactSheet, Measurement, key_of
from kinformer.lab.data import FileTokenizer
from kinformer.lab.estimation.estimate import state_bytes
from kinformer.lab.runs.minutes import resized
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.runs.planner import (
    check_source,
    checked,
    group_of,
    named_data,
    open_planner,
    planner_for,
    training_of_paper,
)
from kinformer.lab.tasks.table import task_for
from kinformer.lab.tasks.task import Task, TrainingPlan
from kinformer.lab.training.settings import Settings
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError, memory_sentence, nearest, plural
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note

# The entrants of a comparison: members or hybrids of members, with their changes, at one budget of parameters.

TOLERANCE = 0.05
STATE_LENGTHS = (128, 256, 1024, 4096, 16384, 65536)
GRAIN, FINE, NARROWEST, WIDEST = 16, 4, 16, 1 << 14


@dataclass(frozen=True)
class Entrant:
    """A model to compare.

    parts: the members of a hybrid with their numbers of consecutive layers in the stack's cycle. The first part also
        gives everything except layers. A plain member is one part.
    changes: the changes of the config.
    """

    name: str
    spec: str
    parts: tuple[tuple[str, int], ...]
    changes: Mapping[str, object] = field(default_factory=dict)

    @property
    def member(self) -> str:
        """The member that gives everything except layers."""
        return self.parts[0][0]

    def needs(self, task_options: type) -> dict[str, object]:
        """Return the options of the task that belong to the method of its members."""
        names = {item.name for item in fields(task_options)}
        needs = (need for name, _ in self.parts for need in member(name).needs.items())
        return {option: value for option, value in needs if option in names}

    def layers(self, recipe: str, config: ModelConfig) -> dict[str, object]:
        """Return the changes that put the layers of the other members into the cycle; empty for a plain member."""
        if len(self.parts) == 1:
            return {}
        cycle = [name for name, count in self.parts for _ in range(count)]
        depth = max(len(cycle), len(config.layers) // len(cycle) * len(cycle))
        result: dict[str, object] = {"layers": depth} if depth != len(config.layers) else {}
        for index in range(depth):
            if (name := cycle[index % len(cycle)]) != self.member:
                others = configure(name, recipe).layers
                result[f"layers.{index}"] = to_dict(others[index % len(others)])
        return result


def entrants(specs: Sequence[str], changes: Mapping[str, object]) -> list[Entrant]:
    """Return the entrants that ``specs`` name, as ``gpt``, ``linear-transformer:3,gpt:1`` or ``wide=gpt``. ``changes``
    maps ``path`` to a value for all entrants, or ``NAME:path`` to a value for one entrant."""

    def owner_of(path: str) -> str:
        return path.rpartition(":")[0]

    parsed = [Entrant(*parse_spec(spec)) for spec in specs]
    names = [entrant.name for entrant in parsed]
    for name in names:
        if names.count(name) > 1:
            raise KinformerError(f"{name}: is named twice; give one entrant another name, as in other={name}.")
    for path in changes:
        if (owner := owner_of(path)) and owner not in names:
            raise KinformerError(f"`set` {path}: {owner!r} is not compared; {nearest(owner, names)}")

    def changes_of(name: str) -> dict[str, object]:
        return {path.rpartition(":")[2]: value for path, value in changes.items() if owner_of(path) in ("", name)}

    return [replace(entrant, changes=changes_of(entrant.name)) for entrant in parsed]


def parameters_of(config: ModelConfig) -> int:
    """Count the parameters of a model of ``config`` without allocating any."""
    with unallocated():
        return sum(parameter.numel() for parameter in config.build().parameters())


def sized(config: ModelConfig, changes: Mapping[str, object], budget: int, name: str) -> dict[str, int]:
    """Return changes of width that bring a model of ``config`` with ``changes`` within 5 % of ``budget`` parameters.
    The width is the nearest multiple of 16 (or of 4), the number of heads stays, and feed-forwards meet the rest.

    Errors: ``KinformerError`` if no width fits.
    """
    parameters_of(override(config, changes, kinds()))  # raises for wrong changes, before any width is tried
    candidates = list(_near(config, changes, budget)) if "dim" not in changes else [{}]
    best: tuple[float, dict[str, int]] = (float("inf"), {})
    for widths in candidates:
        for best_widths in (widths, _feed_forwards(config, widths, changes, budget)):
            count = _count(config, {**best_widths, **changes})
            if count is not None and abs(count / budget - 1) < best[0]:
                best = abs(count / budget - 1), best_widths
        if best[0] <= TOLERANCE / 5:
            break
    if best[0] > TOLERANCE:
        parameters = _count(config, {**best[1], **changes})
        closest = f" (the nearest has {parameters:,})" if parameters else ""
        raise KinformerError(
            f"{name}: no width gives {plural(budget, 'parameter')} within {TOLERANCE:.0%}{closest}; give another "
            "`parameters`, or `set` NAME:dim=... less."
        )
    return {path: value for path, value in best[1].items() if path not in changes}


def _near(config: ModelConfig, changes: Mapping[str, object], budget: int) -> Iterator[dict[str, int]]:
    """Yield the widths around the budget, the nearest multiples of 16 first, then multiples of 4."""
    low, high = NARROWEST, NARROWEST
    while high < WIDEST and (_at(config, high, changes) or 0) < budget:
        low, high = high, 2 * high
    while high - low > GRAIN:
        middle = (low + high) // 2 // GRAIN * GRAIN
        if (_at(config, middle, changes) or budget) < budget:
            low = middle
        else:
            high = middle
    counted = [(dim, _at(config, dim, changes)) for dim in range(low, high + 1, FINE)]
    for _, _, dim in sorted((dim % GRAIN > 0, abs(count / budget - 1), dim) for dim, count in counted if count):
        yield resized(config, dim, heads_of_64=False)


def _at(config: ModelConfig, dim: int, changes: Mapping[str, object]) -> int | None:
    widths = resized(config, dim, heads_of_64=False)
    return _count(config, {**widths, **changes}) if widths else None


def _count(config: ModelConfig, changes: Mapping[str, object]) -> int | None:
    with suppress(KinformerError):
        return parameters_of(override(config, changes, kinds()))
    return None


def _feed_forwards(
    config: ModelConfig, widths: dict[str, int], changes: Mapping[str, object], budget: int
) -> dict[str, int]:
    """Return ``widths`` with feed-forwards whose width meets the budget: parameters are linear in this width."""
    paths = {path: value for path, value in widths.items() if path.endswith("hidden_dim") and path not in changes}
    if not paths:
        layers = config.layers
        hidden = getattr(getattr(layers[0], "feed_forward", None), "hidden_dim", None)
        if hidden is None or len({getattr(layer.feed_forward, "hidden_dim", None) for layer in layers}) > 1:
            return widths
        paths = {"layers.*.feed_forward.hidden_dim": hidden}
    more = {path: value + 8 for path, value in paths.items()}
    counts = [_count(config, {**widths, **result, **changes}) for result in (paths, more)]
    if None in counts or counts[0] == counts[1]:
        return widths
    step = 8 * round((budget - counts[0]) / (counts[1] - counts[0]))  # type: ignore[operator]
    return widths | {path: max(8, value + step) for path, value in paths.items()}


def facts(entrant: Entrant, config: ModelConfig) -> FactSheet:
    """Return an entrant's fact sheet as JSON-ready data; the model is built on the meta device."""
    with unallocated():
        model = config.build()
    limit = model.max_length
    lengths = [length for length in STATE_LENGTHS if limit is None or length <= limit] + ([limit] if limit else [])
    sheets = [member(name).sheet for name, _ in entrant.parts]
    return {
        "members": [
            {**sheet, "axes": list(sheet["axes"]), "departures": list(sheet["departures"])} for sheet in sheets
        ],
        "config": to_dict(config),
        "max_length": limit,
        "state_bytes": {str(length): state_bytes(model, length) for length in sorted(set(lengths))},
        "needs": sorted({f"{name}={value}" for part, _ in entrant.parts for name, value in member(part).needs.items()}),
    }


USUAL_LENGTH = 256


@dataclass
class Contestant:
    """An entrant in a comparison.

    base: the options of training; steps, learning rate and folder are still open.
    fitted: the config of the model at the budget; None before the fit.
    error: the reason why the contestant is out.
    measured: the metrics of the contestant's runs on the test split. Results so far are in ``record``.
    """

    entrant: Entrant
    base: TrainOptions
    task: Task
    fitted: ModelConfig | None
    parameters: int
    identity: JsonObject
    error: str | None = None
    measured: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        changes = self.entrant.changes.items()
        self.record = EntrantRecord(
            name=self.entrant.name,
            spec=self.entrant.spec,
            set={path: value if isinstance(value, dict) else str(value) for path, value in changes},
        )

    def note(self, **results: Any) -> None:
        """Put results into the ``record``, by the names of its fields."""
        self.record = self.record.replace(**results)

    @property
    def config(self) -> ModelConfig:
        """The config of the model, which every contestant without an error has."""
        assert self.fitted is not None
        return self.fitted

    @property
    def name(self) -> str:
        """The contestant's name in the comparison."""
        return self.entrant.name

    def note_error(self) -> None:
        """Print that the contestant is out, if it is."""
        if self.error is not None:
            note(f"{self.name} is out: {self.error}")

    @cached_property
    def model_key(self) -> str:
        """The key of stored results of this model: a digest of the config."""
        return key_of(storable(self.config))

    def options(self, out: Path, lr: float, seed: int, steps: int, **settings: int) -> TrainOptions:
        """Return the options of a run, with the further ``settings`` that the task reads."""
        read: dict[str, Any] = {name: value for name, value in settings.items() if name not in self.task.data.refused}
        return replace(self.base, out=str(out), lr=lr, seed=seed, steps=steps, **read)

    def run_key(self, options: TrainOptions) -> str:
        """Return a digest of all options that decide the result of a run."""
        content = {
            "model": storable(self.config),
            "data": self.identity,
            "task": [self.task.name, dict(options.task_options)],
            "training": vars(options.settings()),
            "versions": [__version__, torch.__version__, options.device],
        }
        return key_of(content)


def planned(options: TrainOptions) -> tuple[Task, TrainingPlan]:
    """Return the task and the plan of a run with these options; nothing is written."""
    planner, options = open_planner(options)
    return planner.task, planner.plan(options)


def with_length(entrants: Sequence[Entrant], options: CompareOptions) -> CompareOptions:
    """Return ``options`` with a length of rows that all models can read: the usual length, or the least maximum."""
    if options.length is not None:
        return options
    task, lengths = first_task(entrants, options), [USUAL_LENGTH]
    for entrant in entrants:
        with suppress(KinformerError):  # the contestant of this entrant reports the error later
            lengths.append(planned(base_of(entrant, options, task))[1].settings.length)
    return replace(options, length=min(lengths))


def with_tokenizer(entrants: Sequence[Entrant], options: CompareOptions) -> CompareOptions:
    """Return ``options`` with the tokenizer of ``train_tokenizer``, trained once and stored in the folder."""
    size = options.train_tokenizer
    if size is None:
        return options
    task = first_task(entrants, options)
    base = replace(base_of(entrants[0], options, task), train_tokenizer=size)
    check_source(base, task)
    spec, folder = named_data(base, task, Path(options.out)), Path(options.out)
    path = folder / f"tokenizer-{key_of([spec, options.holdout, size])}.json"
    if not path.is_file():
        tokenizer = planner_for(base, task, spec).tokenizer
        assert isinstance(tokenizer, FileTokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(path)
    return replace(options, tokenizer=str(path), train_tokenizer=None)


def first_task(entrants: Sequence[Entrant], options: CompareOptions) -> Task:
    """Return the task of the comparison: ``options.task``, or the first entrant's usual task."""
    name = entrants[0].member
    return task_for(options.task, configure(name, options.recipe or "small"), name)


class Sizes(NamedTuple):
    """Sizes that suit a budget of minutes: the ``dim`` of the first entrant (None: by the parameters), the weight decay
    of all (None: the usual value), and roughly the ``steps`` of a run in the time."""

    dim: int | None = None
    weight_decay: float | None = None
    steps: int = 0


def contestants(
    entrants: Sequence[Entrant],
    options: CompareOptions,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> list[Contestant]:
    """Return the entrants as contestants at the parameter budget, ``options.parameters`` or the parameters of the first
    entrant, which has ``sizes``; an entrant that does not fit the budget is out.

    Errors: ``KinformerError`` for a mistake that concerns all entrants: the data, the task, the recipe of training.
    """
    task, contestants_ = first_task(entrants, options), []
    if options.first is not None and (reason := task.evaluation.refused.get("first")):
        raise KinformerError(f"`first` {options.first}: {reason}")
    reads_lengths = any(option.name == "contexts" for option in fields(task.EvaluationOptions))
    if options.contexts != CompareOptions.contexts and not reads_lengths:
        raise KinformerError(
            f"`contexts` {options.contexts}: {task.name} is measured at no other lengths; leave it out."
        )
    for entrant in entrants:
        base = replace(base_of(entrant, options, task), weight_decay=sizes.weight_decay)  # type: ignore[arg-type]
        try:
            task, plan = planned(base)
            contestant = Contestant(entrant, base, task, plan.config, 0, plan.data.identity)
        except KinformerError:
            if entrant is entrants[0]:
                raise
            contestant = Contestant(entrant, base, task, None, 0, {})
        contestants_.append(contestant)
    budget = options.parameters or 0
    for contestant in contestants_:
        with guarded(contestant, "its model", notes=False):
            _fit(contestant, budget, sizes.dim)
            budget = budget or contestant.parameters
    if all(item.error for item in contestants_):
        raise KinformerError(str(contestants_[0].error))
    for contestant in contestants_:
        contestant.note_error()
    return contestants_


def base_of(entrant: Entrant, options: CompareOptions, task: Task) -> TrainOptions:
    """Return the options of training an entrant, without steps, learning rate and folder."""
    recipe = options.recipe or "small"
    shared = (
        "data", "length", "batch_size", "optimizer", "precision", "tokenizer", "holdout", "ema", "device", "threads",
    )  # fmt: skip
    shared_values = {name: getattr(options, name) for name in shared}
    if options.length is not None and type(task).length is not Task.length:
        shared_values["length"] = None  # the data decide the length of each model
    # All members share one recipe of training, so the settings of a member's paper give way to the usual settings.
    published, of_task = training_of_paper(TrainOptions(member=entrant.member, recipe=recipe, out=options.out), task)
    usual_options = {name: getattr(task.Options, name) for name in of_task}
    task_options = {**usual_options, **entrant.needs(task.Options), **options.task_options}
    for name in published:
        if shared_values.get(name) is None and name not in ("steps", "length"):
            usual = task.settings.get(name, getattr(Settings, name))
            shared_values[name] = () if name == "stages" else usual  # None would mean the recipe's stages
    return TrainOptions(
        member=entrant.member,
        out=options.out,
        task=task.name,
        recipe=recipe,
        set=dict(entrant.changes),
        task_options=task_options,
        **shared_values,
    )


def _fit(contestant: Contestant, budget: int, dim: int | None) -> None:
    """Put a hybrid's layers in their places, solve for the width, and check the plan as a new run does. Without a
    ``budget`` the model has the width of its recipe, or ``dim``, with heads as wide as in a model of this width."""
    entrant, base = contestant.entrant, replace(contestant.base, set={})
    _, plan = planned(base)
    layers = entrant.layers(str(base.recipe), plan.config)
    config = override(plan.config, layers, kinds())
    start: dict[str, int] = {} if dim is None else resized(config, dim)
    config = override(config, start, kinds())
    widths = sized(config, entrant.changes, budget, entrant.name) if budget else {}
    contestant.base = replace(base, set={**layers, **start, **widths, **entrant.changes})
    contestant.task, plan = planned(contestant.base)
    contestant.fitted, contestant.identity = plan.config, plan.data.identity
    checked(plan, contestant.task, group_of(contestant.base.parallelism, contestant.base.usable_device().type))
    contestant.parameters = parameters_of(plan.config)


@contextmanager
def guarded(contestant: Contestant, stage: str, notes: bool = True) -> Iterator[None]:
    """Put the contestant out, with a sentence, if the block raises; with ``notes`` print the sentence at once."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        plain = reason if isinstance(error, KinformerError) else f"{type(error).__name__}: {reason.splitlines()[0]}"
        contestant.error = f"{stage}: {memory_sentence(error) or plain}"
        if notes:
            contestant.note_error()


def still_in(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Return the contestants without an error."""
    return [item for item in contestants if item.error is None]


LEAST_SHARED = 1.0
"""The seconds from which on the share of a stage is told; what a process does first waits for files."""


class Clock:
    """The seconds that the stages of a comparison took, and the seconds in which this thread computed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.computing: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started_at, computed = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started_at
            self.computing[stage] = self.computing.get(stage, 0.0) + time.thread_time() - computed

    @property
    def share(self) -> float | None:
        """The share of the time of training in which this thread computed: almost 1 on an idle machine, less on a busy
        one. The share is None where no training took more than ``LEAST_SHARED`` seconds."""
        stages = [stage for stage in ("sweeps", "training") if self.seconds.get(stage, 0.0) > LEAST_SHARED]
        seconds = sum(self.seconds[stage] for stage in stages)
        return min(1.0, sum(self.computing[stage] for stage in stages) / seconds) if stages else None
