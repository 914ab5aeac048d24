"""Evaluation of runs on held-out data, each as its task says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kinformer.core.model import device_of
from kinformer.evaluation.adaptive_computation import PONDER_STEPS, PonderRecorder, noting_steps
from kinformer.runs.language_model import language_model_of
from kinformer.runs.options import EvaluateOptions
from kinformer.runs.run import Run, open_run
from kinformer.runs.spool import spooled
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.evaluation import Evaluation, EvaluationReport, EvaluationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.table import evaluation_options, refuse_options


def evaluate(folders: Sequence[str | Path], options: EvaluateOptions, quiet: bool = True) -> EvaluationReport:
    """Measure the runs in ``folders``, side by side where their task compares them."""
    if not folders:
        raise KinformerError("evaluate: needs DIR; see kinformer evaluate --help.")
    options.check_store()
    runs = [open_run(folder) for folder in folders]
    _check_alike(runs)
    options_of_task = [evaluation_options(run.task, options.task_options, str(run.folder)) for run in runs]
    if getattr(options_of_task[0], "harness", None) is not None:
        from kinformer.runs.harness.evaluate import evaluate_by_harness

        return evaluate_by_harness(runs, options, options_of_task[0], quiet)
    for run in runs:
        refuse_options(run.task.evaluation.refused, options)
    with spooled(options.data) as data:
        options = replace(options, data=data)
        if (report := STORES.evaluate(runs, options, options_of_task[0], quiet)) is not None:
            return report
        evaluation_settings = EvaluationSettings(
            **{field.name: getattr(options, field.name) for field in fields(EvaluationSettings)}
        )
        if len({run.task.name for run in runs}) == 1:
            return _measured(runs, options, evaluation_settings, options_of_task[0], quiet)
        parts = [
            _measured([run], options, evaluation_settings, item, quiet)
            for run, item in zip(runs, options_of_task, strict=True)
        ]
        return EvaluationReport([part.evaluations[0] for part in parts])


def _check_alike(runs: Sequence[Run]) -> None:
    """Refuse runs of models that are measured in different ways."""
    for run in runs[1:]:
        if run.task.models.protocols[0] is not runs[0].task.models.protocols[0]:
            raise KinformerError(
                f"{run.folder}: is a run of the task {run.task.name}, unlike {runs[0].folder}, which is one of "
                f"{runs[0].task.name}; evaluate it by itself."
            )


def _measured(
    runs: Sequence[Run],
    options: EvaluateOptions,
    evaluation_settings: EvaluationSettings,
    task_options: object,
    quiet: bool,
) -> EvaluationReport:
    changes = tuple(f"{path}={value}" for path, value in options.set.items())
    lookups: dict[Path, Mapping[str, object] | None] = {}
    taken: dict[Path, PonderRecorder] = {}

    def load(run: Any) -> LoadedRun:
        model = run.model(options.set).to(options.prepare(options.seed))
        model = STORES.attach(run, model, options)
        lookups[run.folder] = STORES.facts(model)
        taken[run.folder] = open_counts.enter_context(noting_steps(model))
        beside = language_model_of(task_options, device_of(model))
        return LoadedRun(run, model, changes, lookups[run.folder], language_model=beside)

    with ExitStack() as open_counts:
        report = runs[0].task.evaluate(runs, load, evaluation_settings, task_options, quiet)
    evaluations = [_with_steps(item, taken[run.folder]) for run, item in zip(runs, report.evaluations, strict=True)]
    report = replace(report, evaluations=evaluations)
    for run in runs:
        STORES.note_text(lookups.get(run.folder), run, evaluation_settings, getattr(task_options, "holdout", None))
    return report


def _with_steps(evaluation: Evaluation, taken: PonderRecorder) -> Evaluation:
    """Return the evaluation with the steps per token of a model whose tokens halt, unless it has them already."""
    if taken.mean is None or PONDER_STEPS.name in evaluation.metrics:
        return evaluation
    metric = {PONDER_STEPS.name: taken.mean}
    return replace(
        evaluation,
        metrics={**evaluation.metrics, **metric},
        units=(*evaluation.units, PONDER_STEPS),
        facts={**evaluation.facts, **metric},
        text=(*evaluation.text, PONDER_STEPS.text(taken.mean)),
    )
