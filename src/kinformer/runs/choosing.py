"""Choosing options by a budget of minutes: the base of choosers, the timing of a step, and the choice as flags."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from kinformer.core.model_config import ModelConfig
from kinformer.runs.options import TrainOptions
from kinformer.runtime.errors import marked
from kinformer.tasks.task import Task, TrainingPlan
from kinformer.training.data_module import DataModule
from kinformer.training.distributed import Group
from kinformer.training.loop import Trainer
from kinformer.training.update import Updater


@dataclass
class Choosing:
    """The base of choosers by minutes: ``options`` are the ``requested`` ones, with a vocabulary.

    plan: gives the training plan of complete options, or refuses them. recipe: the config that is open to changes;
    None where the model is given. started_at: when the minutes began to count, by ``time.monotonic()``.
    """

    requested: TrainOptions
    options: TrainOptions
    task: Task
    plan: Callable[[TrainOptions], TrainingPlan]
    recipe: ModelConfig | None
    device: str
    started_at: float

    @property
    def budget(self) -> float:
        """Return the seconds of the minutes."""
        return 60 * (self.options.minutes or 0)

    def left(self) -> float:
        """Return the seconds of them that are left now."""
        return self.budget - (time.monotonic() - self.started_at)


def measured_update(plan: TrainingPlan, task: Task, device: str) -> tuple[Updater, DataModule]:
    """Return an updater that makes the steps of ``plan``, and its data, to measure how long a step takes."""
    torch.manual_seed(plan.settings.seed)
    model = plan.config.build()
    data = task.data_module(plan)
    objective = task.objective(plan.settings.objective, model, data)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, data, objective, plan.settings, Path(folder), Group(torch.device(device)), quiet=True)
    return trainer.update, data


def flags_between(before: TrainOptions, after: TrainOptions) -> Iterator[str]:
    """Yield the options that differ, as they are written on the command line."""
    for field in fields(TrainOptions):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(new, Mapping):
            for name, value in new.items():
                if name in old:
                    continue
                if field.name == "set":
                    yield f"`set` '{name}={value}'" if "*" in name else f"`set` {name}={value}"
                else:
                    yield marked(name) if value is True else f"{marked(name)} {value}"
        elif new != old:
            yield f"{marked(field.name)} {new}"
