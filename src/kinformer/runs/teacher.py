"""The teacher of a run: another run's model, whose predictions are learnt."""

from __future__ import annotations

from typing import Any

from kinformer.runs.run import Run, open_run
from kinformer.runtime.errors import KinformerError


def teacher_of(run: Run) -> Any:
    """The model, in eval mode and frozen, of the run that the option ``teacher`` names; None where there is none.

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
