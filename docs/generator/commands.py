"""How a member is trained, measured and used: commands that follow from its record and its task."""

from __future__ import annotations

import shlex
from typing import Any

from kinformer.core.parts import NeedsStore
from kinformer.family.record import Member
from kinformer.lab.tasks.table import task_for, tasks
from kinformer.lab.tasks.task import Task


def usual_task(member: Member, config: Any) -> Task:
    """What it is trained for unless told otherwise."""
    return task_for(None, config, member.name)


def other_tasks(member: Member, config: Any) -> list[Task]:
    """What else models like it can be trained for."""
    usual = usual_task(member, config)
    return [task for task in tasks() if task.suits(config) and task.name != usual.name]


def training(member: Member, config: Any) -> list[str]:
    """Command lines: train, evaluate, generate where it does, draw."""
    task, name = usual_task(member, config), member.name
    run = f"runs/{name}"
    lines = []
    options = _needs(member)
    if isinstance(config.head, NeedsStore):
        lines = [
            "kinformer train rope --minutes 5 --out runs/rope",
            "kinformer index runs/rope --split train --datastore stores/rope",
        ]
        options += " --datastore stores/rope --retriever runs/rope --steps 500"
    else:
        options += " --minutes 5"
    if task.data.default is None:
        options += " --data DATA"
    lines.append(f"kinformer train {name}{options} --out {run}")
    lines.append(f"kinformer evaluate {run}")
    if name == "knn-lm":
        store = f"stores/{name}"
        lines.append(f"kinformer index {run} --split train --datastore {store}")
        lines.append(f"kinformer evaluate {run} --datastore {store} --tune")
    if getattr(config.stack, "rule", None) is not None and name == "calm":
        lines.append(f"kinformer calibrate {run} --risk 0.05")
    lines += _use(task, run)
    return lines


def _use(task: Task, run: str) -> list[str]:
    """Generating, where the task can."""
    if task.name == "next-token":
        return [f"kinformer generate {run} --prompt {shlex.quote('def ')} --max-new-tokens 120"]
    return []


def _needs(member: Member) -> str:
    flags = ""
    for name, value in member.needs.items():
        flags += f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}")
    return flags
