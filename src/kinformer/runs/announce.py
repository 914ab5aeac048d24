"""A few lines that say what training is going to do, before it begins."""

from __future__ import annotations

import torch

from kinformer.runs.inheriting import inheritance_text
from kinformer.runs.run import Run
from kinformer.runtime.errors import spelled
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.processor import emulates_bfloat16
from kinformer.runtime.words import plural
from kinformer.training.distributed import Group
from kinformer.training.result import Result
from kinformer.training.settings import WARM_UP_STEPS, Settings

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def announcement(run: Run, settings: Settings, parameters: int, group: Group, frozen: int = 0) -> str:
    """Return lines with the member, recipe, parameters and task, what is taken over from the run of ``init``, the data
    and their size, the device, the precision, the tokens a step, and a note on ``frozen`` random parameters."""
    rows, length = settings.batch_size, settings.length
    work = f"{rows} x {length} = {plural(rows * length, 'token')} a step"
    note = spelled(
        f"\nkinformer: note: {plural(frozen, 'parameter')} frozen at random values: `init` RUN takes "
        "those of a run in which they learnt, as by `task` dino; `set` input.frozen=false lets them learn"
    )
    begins = inheritance_text(run.data)
    begins = f"{begins}\n" if begins else ""
    return (
        f"kinformer: {run.member} ({run.recipe}), {plural(parameters, 'parameter')}, task {run.task.name}\n"
        f"{begins}"
        f"kinformer: data {_data(run.data)}; {_device(group)}, {_precision(group, settings)}, {work}"
        f"{note if 0 < frozen < parameters and not run.data.get('init') else ''}"
    )


def warning(result: Result, settings: Settings) -> str | None:
    """Return a sentence if a run that was not interrupted made fewer steps than a warm-up has, else None."""
    steps, made = result.steps, plural(result.steps, "step")
    if result.signal:
        return None
    if settings.minutes is not None and steps < WARM_UP_STEPS:
        return (
            f"kinformer: only {made} could be made in {settings.minutes:g} minutes, fewer than a warm-up takes "
            f"({WARM_UP_STEPS}), so little is learnt; give more `minutes`, a smaller `recipe` or `batch_size`."
        )
    if steps < settings.warmup:
        return (
            f"kinformer: a warm-up of {settings.warmup:g} steps does not end in a run of {made}, so the learning rate "
            "stayed below `lr`; give more steps, or a smaller `warmup`."
        )
    return None


def _data(data: JsonObject) -> str:
    """Return the data's name and how much of it there is to train on."""
    identity = data.get("identity") or {}
    name = str(identity.get("name") or data.get("spec"))
    if train := identity.get("bytes", {}).get("train"):
        return f"{name}, {_bytes(train)} to train on"
    if train := identity.get("examples", {}).get("train"):
        return f"{name}, {plural(train, 'example')} to train on"
    return name


def _bytes(count: int) -> str:
    for least, unit in _UNITS:
        if count >= least:
            return f"{count / least:.3g} {unit}"
    return plural(count, "byte")


def _precision(group: Group, settings: Settings) -> str:
    slow = settings.precision == "bf16-mixed" and group.device.type == "cpu" and emulates_bfloat16()
    return f"{settings.precision} (this processor emulates bfloat16: fp32 is faster)" if slow else settings.precision


def _device(group: Group) -> str:
    threads = f" ({plural(torch.get_num_threads(), 'thread')})" if group.device.type == "cpu" else ""
    return f"{group.device}{threads}" if group.world == 1 else f"{group.world} x {group.device.type}{threads}"
