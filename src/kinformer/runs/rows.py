"""What a run learns from: its data, opened, and the rows that its task makes of it."""

from __future__ import annotations

from kinformer.runs.run import Run
from kinformer.runs.stores import STORES
from kinformer.runs.teacher import teacher_of
from kinformer.tasks.task import TrainingPlan
from kinformer.training.data_module import DataModule


def rows_of(run: Run, plan: TrainingPlan, device: str, quiet: bool = True) -> DataModule:
    """The rows of the run's task; neighbours are looked up on ``device`` where the model looks things up."""
    rows = STORES.rows(run.task.data_module(plan), run, plan, device, quiet)
    rows.teacher = teacher_of(run)
    return rows
