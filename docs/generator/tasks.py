"""A page for every task, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from generator import commands
from generator.facts import config_of
from generator.text import contents, escaped, literal, page, table, write
from kinformer.core.model import PROTOCOLS
from kinformer.family.record import Member
from kinformer.family.table import MEMBERS
from kinformer.lab.cli.form import option_docs
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import Task
from kinformer.lab.training.logging import SHARE, Metric
from kinformer.runtime.errors import as_flags, flag_of

OPTIONS = {"Options": "train", "EvaluationOptions": "evaluate", "GenerationOptions": "generate"}


def generate(docs: Path) -> None:
    """Write the pages into ``docs/tasks``."""
    for task in TASKS.values():
        write(docs / "tasks" / f"{task.name}.md", task_page(task))
    write(docs / "tasks" / "index.md", overview())


def task_page(task: Task) -> str:
    """The page as Markdown."""
    usual = [member for member in MEMBERS.values() if _usual(member) == task.name]
    takes = [member for member in MEMBERS.values() if task.suits(config_of(member.name))]
    example = (usual or takes)[0]
    return page(
        f"(task-{task.name})=\n# {task.title.capitalize()}",
        f"`--task {task.name}`",
        escaped(task.description),
        table(("", ""), list(_record(task))),
        "## Metrics",
        table(("metric", "unit", "better"), map(_metric, task.metrics)),
        "The first decides which weights are the best.",
        "## Try it",
        literal("\n".join(_commands(task, example, usual)), "sh"),
        *_options(task),
        "## Members",
        _members("Usually trained for it", usual),
        _members("Can be trained for it", [member for member in takes if member not in usual]),
    )


def _usual(member: Member) -> str:
    return commands.usual_task(member, config_of(member.name)).name


def _record(task: Task) -> Iterator[tuple[str, str]]:
    yield "**Models**", ", ".join(PROTOCOLS.get(protocol, protocol.__name__) for protocol in task.models.protocols)
    inputs = ", ".join(f"`{kind}`" for kind in task.models.inputs or ())
    yield "**Input**", inputs or "any, or fitted to the data"
    yield "**Data if none is given**", f"`{task.data.default}`" if task.data.default else "none; give `--data PATH`"
    yield "**Objectives**", ", ".join(f"`{name}`" for name in task.objectives)
    yield "**Text by a tokenizer**", "yes" if task.data.tokenized else "no"
    if task.settings:
        changed = ", ".join(f"`{flag_of(name)} {value}`" for name, value in task.settings.items())
        yield "**Training, unless told otherwise**", changed
    if task.in_minutes:
        shown = (f"`{flag_of(name)} {value}`" for name, value in task.in_minutes.items() if name != "set")
        shown_sets = (f"`--set {path}={value}`" for path, value in task.in_minutes.get("set", {}).items())
        yield "**With `--minutes`**", ", ".join([*shown, *shown_sets])


def _metric(metric: Metric) -> tuple[str, str, str]:
    unit = "share, from 0 to 1" if metric.unit == SHARE else metric.unit
    return f"`{metric.name}`", unit, "less" if metric.lower_is_better else "more"


def _commands(task: Task, example: Member, usual: list[Member]) -> list[str]:
    if example in usual:
        return commands.training(example, config_of(example.name))
    data = "" if task.data.default else " --data DATA"
    run = f"runs/{task.name}"
    return [
        f"kinformer train {example.name} --task {task.name}{data} --steps 1000 --out {run}",
        f"kinformer evaluate {run}",
    ]


def _options(task: Task) -> Iterator[str]:
    """Its own options, by command."""
    for kind, command in OPTIONS.items():
        own = getattr(task, kind)
        rows = list(option_rows(own))
        if rows:
            yield f"## Options of {command}"
            yield table(("option", "default", ""), rows)


def option_rows(options: type) -> Iterator[tuple[str, str, str]]:
    """(flag, default, what it does) of every field of a dataclass of options."""
    with as_flags():
        docs = option_docs(options)
    for each in fields(options):  # type: ignore[arg-type]
        yield f"`{flag_of(each.name)}`", _shown(each.default), escaped(docs.get(each.name, ""))


def _shown(value: Any) -> str:
    if value is MISSING or value is None:
        return ""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"`{value}`"


def _members(title: str, members: list[Member]) -> str:
    if not members:
        return ""
    return f"{title}: " + ", ".join(f"[{each.name}](../members/{each.name}.md)" for each in members) + "."


def overview() -> str:
    """All tasks as a table."""
    rows = [
        (
            f"[{task.title}]({task.name}.md)",
            f"`{task.name}`",
            PROTOCOLS.get(task.models.protocols[0], ""),
            _metric(task.metrics[0])[0],
            escaped(task.description.split(". ")[0]),
        )
        for task in TASKS.values()
    ]
    return page(
        "# Tasks",
        "What a model is trained for, on which data, and by which metrics it is measured. The task is chosen by "
        "`--task`; without it a member is trained for its usual one.",
        table(("task", "name", "models", "metric", ""), rows),
        contents(*TASKS),
    )
