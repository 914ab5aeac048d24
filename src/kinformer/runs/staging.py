"""A stage of a run: the config of its model, the plan of its rows, and its rows to train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.data.permutation import mix
from kinformer.family.build import weight_shapes
from kinformer.family.kinds import kinds
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.task import TrainingPlan
from kinformer.training.data_module import DataModule
from kinformer.training.stages import Stage

_STAGE = 0x53544147
"""Sets the seeds of stages' rows apart from those of others."""


def config_of(config: ModelConfig, stage: Stage) -> ModelConfig:
    """Return the config of a run's model in ``stage``.

    Errors: ``KinformerError`` where the stage changes what weights depend on.
    """
    if not stage.changes:
        return config
    changed = override(config, stage.changes, kinds())
    before, after = weight_shapes(config), weight_shapes(changed)
    if different := sorted(name for name in before | after if before.get(name) != after.get(name)):
        raise KinformerError(
            f"{', '.join(stage.changes)} changes the weight {different[0]}, but all stages train the same weights; "
            "change settings without weights only, such as windows."
        )
    return changed


def stage_plan(plan: TrainingPlan, stage: Stage) -> TrainingPlan:
    """Return the plan by which a stage's rows are made: those of a run of its own, whose seed is its own, too."""
    seed = stage.settings.seed
    if stage.number:
        seed = int(mix(seed, _STAGE, stage.number)[0] >> np.uint64(1))
    settings = replace(stage.settings, seed=seed, stages=())
    return plan._replace(config=config_of(plan.config, stage), settings=settings)


class StagedRows(DataModule):
    """The rows of a stage that begins at step ``begin``: ``train`` to train on, and those of the run, ``final``, to
    validate with."""

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
