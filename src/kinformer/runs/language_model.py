"""The language model that a task's option ``language_model`` names: another run, which reads this one's outputs."""

from __future__ import annotations

import torch

from kinformer.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.runs import LoadedRun


def language_model_of(task_options: object, device: torch.device) -> LoadedRun | None:
    """Return the run that ``task_options`` name, with its model on ``device``; None where they name none.

    Errors: ``KinformerError`` for a run that continues no text.
    """
    name = getattr(task_options, "language_model", None)
    if name is None:
        return None
    run = open_run(name)
    if run.task.name != "next-token":
        raise KinformerError(
            f"`language_model` {name}: is a run of the task {run.task.name}, which predicts no text; give a run of "
            "next-token that was trained on transcripts, one a line."
        )
    return LoadedRun(run, run.model().to(device))
