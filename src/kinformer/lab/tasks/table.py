"""The one list of tasks. The trainer, the command line and the Python functions are driven by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from kinformer.core.model import PROTOCOLS
from kinformer.lab.tasks import (
    algorithm,
    classify,
    control,
    dino,
    image,
    listops,
    mae,
    mlm,
    mpp,
    next_token,
    recall,
    speech,
    super_resolution,
    trajectories,
    translate,
    vision,
)
from kinformer.lab.tasks.task import Task
from kinformer.runtime import plugins
from kinformer.runtime.errors import KinformerError, choose, marked, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kinformer.core.stack import ModelConfig

PAGES = (
    next_token,
    recall,
    algorithm,
    image,
    trajectories,
    control,
    mlm,
    classify,
    listops,
    speech,
    vision,
    dino,
    mae,
    mpp,
    translate,
    super_resolution,
)
TASKS: dict[str, Task] = {page.TASK.name: page.TASK for page in PAGES}

OptionKind = Literal["Options", "EvaluationOptions", "GenerationOptions", "PredictionOptions"]
"""Which of a task's own options: for training, measuring, generating or predicting."""

ALL = plugins.Registry.of_records(Task, TASKS, plugins.TASKS)
"""Kinformer's own tasks, and those of other packages, which are imported when they are looked up."""


def tasks(complain: Callable[[str], object] = plugins.warn_once) -> list[Task]:
    """Return the records of all tasks, Kinformer's own first, in the order of the table.

    ``complain`` gets a sentence for every task of another package that cannot be imported, which is left out.
    """
    return ALL.available(complain)


def task(name: str, package: str | None = None) -> Task:
    """Return the record called ``name``; an unknown name is an error that lists the nearest.

    ``package`` ("name version", as ``ALL.package(name)`` returns it) is where a stored run's task came from; if it is
    no longer there, the error says so.
    """
    ALL.check_package(name, package)
    return ALL[choose(name, ALL, "task")]


def task_for(wanted: str | None, config: ModelConfig, member: str) -> Task:
    """Return the task to train a member on: the one called ``wanted``, or the first for models like it."""
    if wanted is None:
        return _first([item for item in tasks() if item.takes(config)], member)
    task_ = task(wanted)
    if not task_.takes(config):
        raise KinformerError(
            f"`task` {wanted}: {member} is {what_fits(config, tasks())}; choose one, or another member."
        )
    return task_


def task_of(config: ModelConfig) -> Task:
    """Return the task that a model of ``config``, as it is, was made for."""
    records = tasks()
    fitting = [item for item in records if item.fits(config)]
    return _first(fitting or [item for item in records if item.takes(config)], config.kind)


def _first(fitting: list[Task], name: str) -> Task:
    if not fitting:
        raise KinformerError(f"there is no task for {name}; {what_tasks_there_are()}")
    return fitting[0]


def what_fits(config: ModelConfig, candidates: Sequence[Task]) -> str:
    """Return what a model of ``config`` is, and the tasks for it, for a message."""
    fitting = ", ".join(task.name for task in candidates if task.suits(config))
    kind = config.input.kind
    reads = "" if kind == "tokens" else f" that reads {kind}"
    return (
        f"{PROTOCOLS.get(config.protocol, config.protocol.__name__)}{reads}, whose tasks are {fitting or 'none here'}"
    )


def refuse_options(refused: Mapping[str, str], options: DataclassInstance) -> None:
    """Refuse those of the ``refused`` general options, each with its reason, that ``options`` (a dataclass) sets."""
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in refused and value != option.default:
            raise KinformerError(f"{marked(option.name)} {value}: {refused[option.name]}")


def what_tasks_there_are() -> str:
    """Return a list of all tasks for an error message."""
    return f"the tasks are {', '.join(ALL)}."


def option_names(kind: OptionKind) -> dict[str, Task]:
    """Return the names of all tasks' own options of one kind, each with the first task that has it."""
    return {option.name: item for item in reversed(tasks()) for option in fields(getattr(item, kind))}


def training_options(task_: Task, values: Mapping[str, object]) -> DataclassInstance:
    """Return the task's own options of training from ``values`` by name; refuse one of another task."""
    return _options_of(task_, "Options", values, lambda owner: f"the task {owner.name}, not for {task_.name}")


def evaluation_options(task_: Task, values: Mapping[str, object], folder: str) -> Any:
    """Return the task's own options of measuring from ``values`` by name; refuse one of another task."""
    return _options_of(
        task_, "EvaluationOptions", values, lambda owner: f"models of the {owner.title}, not for {folder}"
    )


def generation_options(task_: Task, values: Mapping[str, object], folder: str) -> DataclassInstance:
    """Return the task's own options of generating from ``values`` by name; refuse one of another task."""
    return _options_of(
        task_, "GenerationOptions", values, lambda owner: f"models of the {owner.title}, not for {folder}"
    )


def prediction_options(task_: Task, values: Mapping[str, object], folder: str) -> DataclassInstance:
    """Return the task's own options of predicting from ``values`` by name; refuse one of another task."""
    return _options_of(
        task_, "PredictionOptions", values, lambda owner: f"models of the {owner.title}, not for {folder}"
    )


def _options_of(
    task_: Task, kind: OptionKind, values: Mapping[str, object], describe: Callable[[Task], str]
) -> DataclassInstance:
    options, owners = getattr(task_, kind), option_names(kind)
    for name, value in values.items():
        if name in {option.name for option in fields(options)}:
            continue
        if name not in owners:
            raise KinformerError(f"{name!r} is not an option of the task {task_.name}; {nearest(name, owners)}")
        shown = "" if isinstance(value, bool) or kind != "Options" else f" {value}"
        raise KinformerError(f"{marked(name)}{shown}: is for {describe(owners[name])}; leave it out.")
    return options(**values)
