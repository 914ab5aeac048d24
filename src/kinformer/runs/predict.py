"""Prediction with a trained run: classes, filled masks, transcripts, translations, answers, actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from kinformer.core.model import device_of
from kinformer.runs.language_model import language_model_of
from kinformer.runs.prediction_options import PredictOptions
from kinformer.runs.run import open_run
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError, marked
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.record import PREDICTING
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.table import prediction_options
from kinformer.tasks.task import Task


def predictions(folder: str | Path, source: object, options: PredictOptions) -> Iterator[Predicted]:
    """Yield the predictions of the run in ``folder`` for the items of ``source``, one by one as they are computed.

    source: a file or a folder, "-" for standard input, or a list of items.

    Errors: ``KinformerError`` for a task that predicts nothing, an option that it does not read, and a bad item.
    """
    run = open_run(folder)
    if run.task.prediction.refusal is not None:
        raise KinformerError(
            f"{run.folder}: is a run of {run.member!r} for the task {run.task.name}; {run.task.prediction.refusal}"
        )
    task_options = prediction_options(run.task, options.task_options, str(run.folder))
    _check_read(run.task, options)
    settings = PredictionSettings(**{item.name: getattr(options, item.name) for item in fields(PredictionSettings)})
    model = STORES.attach(run, run.model(options.set).to(options.prepare(options.seed)))
    subject = LoadedRun(run, model, language_model=language_model_of(task_options, device_of(model)))
    yield from run.task.predict(subject, source, settings, task_options)


def _check_read(task: Task, options: PredictOptions) -> None:
    """Refuse the general options that mean nothing to a task."""
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in PREDICTING and option.name not in task.prediction.reads and value != option.default:
            raise KinformerError(
                f"{marked(option.name)} {value}: predictions of the task {task.name} do not read it; leave it out."
            )
