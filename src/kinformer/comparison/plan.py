"""The plan of a comparison: the same data, order and recipe for every contestant, at one parameter budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kinformer import __version__
from kinformer.comparison.cache import key_of
from kinformer.comparison.entrants import Entrant, parameters_of, sized
from kinformer.comparison.options import CompareOptions
from kinformer.comparison.results import Results
from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.data import FileTokenizer
from kinformer.family.build import configure, storable
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.runs.create import checked, group_of
from kinformer.runs.options import TrainOptions
from kinformer.runs.planning import check_source, named_data, planner_for
from kinformer.runtime.errors import KinformerError, memory_sentence
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note
from kinformer.tasks.table import task_for
from kinformer.tasks.task import Task, TrainingPlan
from kinformer.training.settings import Settings

USUAL_LENGTH = 256


@dataclass
class Contestant:
    """An entrant with the ``base`` of its training (steps, learning rate and folder are still open), its model's
    config (None: not known), and its parameters; ``error`` says why it is out."""

    entrant: Entrant
    base: TrainOptions
    task: Task
    fitted: ModelConfig | None
    parameters: int
    identity: JsonObject
    error: str | None = None
    results: Results = field(default_factory=Results)

    @property
    def config(self) -> ModelConfig:
        """The config of its model, which is known of every contestant that is not out."""
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
        """The key under which results of this model are stored: a digest of its config."""
        return key_of(storable(self.config))

    def options(self, out: Path, lr: float, seed: int, steps: int, **settings: int) -> TrainOptions:
        """Return the options of one run of it, with those of the further ``settings`` that its task reads."""
        read: dict[str, Any] = {name: value for name, value in settings.items() if name not in self.task.data.refused}
        return replace(self.base, out=str(out), lr=lr, seed=seed, steps=steps, **read)

    def run_key(self, options: TrainOptions) -> str:
        """Return a digest of all that decides the outcome of a run."""
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
    task = task_for(options.task, configure(options.member, options.recipe or "small"), options.member)
    check_source(options, task)
    planner = planner_for(options, task, named_data(options, task, Path(options.out)))
    return task, planner.plan(options)


def with_length(entrants: Sequence[Entrant], options: CompareOptions) -> CompareOptions:
    """Return ``options`` with a length of rows that all entrants' models can read: the usual one, or the least of
    theirs."""
    if options.length is not None:
        return options
    task, lengths = first_task(entrants, options), [USUAL_LENGTH]
    for entrant in entrants:
        with suppress(KinformerError):  # of which its contestant tells
            lengths.append(planned(_base(entrant, options, task))[1].settings.length)
    return replace(options, length=min(lengths))


def with_tokenizer(entrants: Sequence[Entrant], options: CompareOptions) -> CompareOptions:
    """Return ``options`` with the tokenizer of ``train_tokenizer``, trained once and stored in the folder."""
    size = options.train_tokenizer
    if size is None:
        return options
    task = first_task(entrants, options)
    base = replace(_base(entrants[0], options, task), train_tokenizer=size)
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
    """Return the task of the comparison: that of ``options.task``, or the usual one of the first entrant."""
    name = entrants[0].member
    return task_for(options.task, configure(name, options.recipe if options.recipe else "small"), name)


def _refuse_unread(task: Task, options: CompareOptions) -> None:
    """Refuse the options of measuring that the ``task`` does not read."""
    if options.max_bytes is not None and (reason := task.evaluation.refused.get("max_bytes")):
        raise KinformerError(f"`max_bytes` {options.max_bytes}: {reason}")
    reads_lengths = any(option.name == "lengths" for option in fields(task.EvaluationOptions))
    if options.contexts != CompareOptions.contexts and not reads_lengths:
        raise KinformerError(
            f"`contexts` {options.contexts}: the task {task.name} is measured at no other lengths; leave it out."
        )


def contestants(entrants: Sequence[Entrant], options: CompareOptions) -> list[Contestant]:
    """Return the entrants at the parameter budget; one that cannot be brought to it is out, with the reason.

    Errors: ``KinformerError`` for what is wrong of all of them: the data, the task, the recipe of training.
    """
    task, contestants_ = first_task(entrants, options), []
    _refuse_unread(task, options)
    for entrant in entrants:
        base = _base(entrant, options, task)
        try:
            task, plan = planned(base)
            contestant = Contestant(entrant, base, task, plan.config, 0, plan.data.identity)
        except KinformerError:
            if entrant is entrants[0]:
                raise
            contestant = Contestant(entrant, base, task, None, 0, {})
        contestants_.append(contestant)
    budget = options.parameters or parameters_of(contestants_[0].config)
    for contestant in contestants_:
        with guarded(contestant, "its model", notes=False):
            _fit(contestant, budget)
    if all(item.error for item in contestants_):
        raise KinformerError(str(contestants_[0].error))
    for contestant in contestants_:
        contestant.note_error()
    return contestants_


def _base(entrant: Entrant, options: CompareOptions, task: Task) -> TrainOptions:
    recipe = options.recipe
    shared = (
        "data",
        "length",
        "batch_size",
        "optimizer",
        "precision",
        "tokenizer",
        "holdout",
        "ema",
        "device",
        "threads",
    )
    shared_values = {name: getattr(options, name) for name in shared}
    if options.length is not None and type(task).length is not Task.length:
        shared_values["length"] = None  # the data decide it, for every model by itself
    task_options = {**entrant.needs(task.Options), **options.task_options}
    # What a recipe's paper trained with gives way to what all members share.
    for name in member(entrant.member).training.get(recipe, {}):
        if shared_values.get(name) is None and name not in ("steps", "length"):
            usual = task.settings.get(name, getattr(Settings, name))
            shared_values[name] = () if name == "stages" else usual  # None would be the recipe's
    return TrainOptions(
        member=entrant.member,
        out=options.out,
        task=task.name,
        recipe=recipe,
        set=dict(entrant.changes),
        task_options=task_options,
        **shared_values,
    )


def _fit(contestant: Contestant, budget: int) -> None:
    """Put a hybrid's layers in their places, solve for the width, and check what would be trained as a new run does."""
    entrant, base = contestant.entrant, replace(contestant.base, set={})
    _, plan = planned(base)
    layers = entrant.layers(str(base.recipe), plan.config)
    config = override(plan.config, layers, kinds())
    widths = sized(config, entrant.changes, budget, entrant.name)
    contestant.base = replace(base, set={**layers, **widths, **entrant.changes})
    contestant.task, plan = planned(contestant.base)
    contestant.fitted, contestant.identity = plan.config, plan.data.identity
    checked(plan, contestant.task, group_of(contestant.base, contestant.base.usable_device().type))
    contestant.parameters = parameters_of(plan.config)


@contextmanager
def guarded(contestant: Contestant, stage: str, notes: bool = True) -> Iterator[None]:
    """Put the contestant out, with a sentence, where anything inside fails; with ``notes`` it is printed at once."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        plain = reason if isinstance(error, KinformerError) else f"{type(error).__name__}: {reason.splitlines()[0]}"
        contestant.error = f"{stage}: {memory_sentence(error) or plain}"
        if notes:
            contestant.note_error()


def still_in(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Return the contestants that are not out."""
    return [item for item in contestants if item.error is None]


class Clock:
    """The seconds that the stages of a comparison took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started_at
