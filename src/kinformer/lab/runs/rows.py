"""The training rows of a run in each of its stages, and the teacher of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kinformer.core.config import override
from kinformer.core.model import WholeModel
from kinformer.core.stack import ModelConfig
from kinformer.family.build import weight_shapes
from kinformer.family.kinds import kinds
from kinformer.lab.data.sampling import mix
from kinformer.lab.datastore.retrieval import with_neighbours
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.tasks.task import Data, Source, TrainingPlan
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.schedule import Stage
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError


def data_of(run: Run) -> Data:
    """Open the data that a run was trained on."""
    by_user, field = run.by_user, run.data.get("text_field")
    source = Source(run.data["spec"], run.data.get("holdout"), run.tokenizer, field, by_user, run)
    return run.task.open(source, run.options)


def plan_of(run: Run, settings: Settings) -> TrainingPlan:
    """Return the training plan of ``run`` with ``settings``."""
    return TrainingPlan(run.config, data_of(run), settings, run.options, run.tokenizer)


_STAGE = 0x53544147
"""The constant that keeps the seeds of stages' rows apart from all other seeds."""


def config_of(config: ModelConfig, stage: Stage) -> ModelConfig:
    """Return the config of a run's model in ``stage``."""
    if not stage.changes:
        return config
    changed = override(config, stage.changes, kinds())
    before, after = weight_shapes(config), weight_shapes(changed)
    if different := sorted(name for name in before | after if before.get(name) != after.get(name)):
        raise KinformerError(
            f"{', '.join(stage.changes)} changes the weight {different[0]}, but all stages train the same weights; "
            "change settings without weights, such as windows."
        )
    return changed


def stage_plan(plan: TrainingPlan, stage: Stage) -> TrainingPlan:
    """Return the plan of a stage's rows, which are made as for a separate run with a separate seed."""
    seed = stage.settings.seed
    if stage.number:
        seed = int(mix(seed, _STAGE, stage.number)[0] >> np.uint64(1))
    settings = replace(stage.settings, seed=seed, stages=())
    return plan._replace(config=config_of(plan.config, stage), settings=settings)


class StagedRows(DataModule):
    """The rows of a stage that begins at step ``begin``: ``train`` for training, the run's ``final`` for validation."""

    def __init__(self, train: DataModule, final: DataModule, begin: int) -> None:
        self.train, self.final, self.begin_step = train, final, begin
        self.sums, self.metrics, self.teacher = final.sums, final.metrics, final.teacher
        self.carries, self.by_time = final.carries, final.by_time

    @property
    def validations(self) -> int:
        return self.final.validations

    def batch(self, step: int, rank: int, world: int) -> Any:
        return self.train.batch(step - self.begin_step, rank, world)

    def validation(self, rank: int, world: int) -> Iterator[Any]:
        return self.final.validation(rank, world)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return self.final.measured(means, split)

    def baselines(self) -> dict[str, float]:
        return self.final.baselines()


def rows_of(run: Run, plan: TrainingPlan, device: str, quiet: bool = True) -> DataModule:
    """Return the rows of the run's task; a model with a datastore looks up its neighbours on ``device``."""
    rows = with_neighbours(run.task.data_module(plan), run, open_run, plan, device, quiet)
    rows.teacher = teacher_of(run)
    return rows


def staged_rows(run: Run, plan: TrainingPlan, stage: Stage, device: str, quiet: bool = True) -> DataModule:
    """Return the rows of ``run``, which has ``plan``, in ``stage``."""
    final = rows_of(run, plan, device, quiet)
    if stage.count == 1:
        return final
    if type(final).begin is not DataModule.begin:
        raise KinformerError(f"`stages`: the task {run.task.name} makes its rows by acting; give `stages` [].")
    return StagedRows(rows_of(run, stage_plan(plan, stage), device, quiet), final, stage.begin)


def teacher_of(run: Run) -> WholeModel | None:
    """Return the model, in eval mode and frozen, of the run that the option ``teacher`` names; None without one."""
    name = getattr(run.options, "teacher", None)
    if name is None:
        return None
    teacher = open_run(name)
    if teacher.task.name != run.task.name:
        what = f"is a run of the task {teacher.task.name}"
        raise KinformerError(f"`teacher` {name}: {what}; give one of {run.task.name}.")
    classes, learnt = ((item.data.get("identity") or {}).get("classes") for item in (teacher, run))
    if classes != learnt:
        raise KinformerError(
            f"`teacher` {name}: has other classes ({', '.join(classes or ['unknown ones'])}); give one of this data."
        )
    channels = [getattr(item.config.input, "channels", None) for item in (teacher, run)]
    if channels[0] != channels[1]:
        raise KinformerError(f"`teacher` {name}: reads images of {channels[0]} channels, but these have {channels[1]}.")
    return teacher.model().requires_grad_(False)
