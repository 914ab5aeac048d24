"""The rows that a run learns from, as its task makes them of the data, and its teacher, another model."""

from __future__ import annotations

from kinformer.core.model import WholeModel
from kinformer.runs.run import Run, open_run
from kinformer.runs.staging import StagedRows, stage_plan
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.task import TrainingPlan
from kinformer.training.data_module import DataModule
from kinformer.training.stages import Stage


def rows_of(run: Run, plan: TrainingPlan, device: str, quiet: bool = True) -> DataModule:
    """Return the rows of the run's task; neighbours are looked up on ``device`` where the model looks things up."""
    rows = STORES.rows(run.task.data_module(plan), run, plan, device, quiet)
    rows.teacher = teacher_of(run)
    return rows


def staged_rows(run: Run, plan: TrainingPlan, stage: Stage, device: str, quiet: bool = True) -> DataModule:
    """Return the rows of ``run``, which has ``plan``, in ``stage``.

    Errors: ``KinformerError`` for a task whose rows the model itself makes.
    """
    final = rows_of(run, plan, device, quiet)
    if stage.count == 1:
        return final
    if type(final).begin is not DataModule.begin:
        raise KinformerError(
            f"`stages`: the task {run.task.name} makes its rows by acting, at sizes of its own; give `stages` []."
        )
    return StagedRows(rows_of(run, stage_plan(plan, stage), device, quiet), final, stage.begin)


def teacher_of(run: Run) -> WholeModel | None:
    """Return the model, in eval mode and frozen, of the run that the option ``teacher`` names; None without one.

    Errors: ``KinformerError`` for a run of another task, of other classes, or of inputs of another shape.
    """
    name = getattr(run.options, "teacher", None)
    if name is None:
        return None
    teacher = open_run(name)
    if teacher.task.name != run.task.name:
        raise KinformerError(
            f"`teacher` {name}: is a run of the task {teacher.task.name}; give one of {run.task.name}."
        )
    classes, learnt = ((item.data.get("identity") or {}).get("classes") for item in (teacher, run))
    if classes != learnt:
        raise KinformerError(
            f"`teacher` {name}: has other classes ({', '.join(classes or ['unknown ones'])}) than there are to learn; "
            "give a run on the same data."
        )
    channels = [getattr(item.config.input, "channels", None) for item in (teacher, run)]
    if channels[0] != channels[1]:
        raise KinformerError(f"`teacher` {name}: reads images of {channels[0]} channels, but these have {channels[1]}.")
    return teacher.model().requires_grad_(False)
