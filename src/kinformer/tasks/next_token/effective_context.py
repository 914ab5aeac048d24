"""How far back each of a group of runs makes use of what it reads (``evaluation.recl``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kinformer.evaluation.recl import Losses, Recl, check, context_losses, recl, spread_positions
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import note, progressing
from kinformer.tasks.evaluation import EvaluationReport, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.lengths import Length, short_names, trained_at
from kinformer.tasks.shared.options import NextTokenEvaluationOptions
from kinformer.tasks.shared.text import HeldOut, held_out, tokenizer_of
from kinformer.tasks.task import Load
from kinformer.training.metric import Metric

STEPS = 8
RECL = Metric("recl", "tokens", lower_is_better=False)


def evaluate_recl(
    runs: Sequence[TrainedRun],
    load: Load,
    evaluation_settings: EvaluationSettings,
    task_options: NextTokenEvaluationOptions,
    contexts: Sequence[int],
    quiet: bool,
) -> EvaluationReport:
    """Measure the group at every context."""
    check(contexts, task_options.hardest)
    held = _same_data(runs, evaluation_settings, task_options.holdout)
    losses = np.stack(
        [_losses(load(run), held, contexts, evaluation_settings.chunk, task_options, quiet) for run in runs]
    )
    curves = recl(losses, contexts, hardest=task_options.hardest)
    names = short_names([run.folder for run in runs])
    if task_options.plot is not None:
        from kinformer.figures.effective_context import plot

        plot(names, contexts, curves, Path(task_options.plot))
        note(f"drew {task_options.plot}")
    evaluations = [
        evaluated(LoadedRun(run, None), {RECL: result.length}, held.identity, (), facts=_facts(result, loss))
        for run, result, loss in zip(runs, curves, losses, strict=True)
    ]
    facts = {"data": held.identity, "contexts": contexts, "tokens": losses.shape[2], "hardest": task_options.hardest}
    by_run = {"runs": [evaluation.facts for evaluation in evaluations]}
    return EvaluationReport(
        evaluations,
        _blocks(names, held, contexts, curves, f"{task_options.hardest:.0%} of {losses.shape[2]}"),
        facts | by_run,
    )


def contexts_of(runs: Sequence[TrainedRun], lengths: Sequence[Length]) -> list[int]:
    """Return the contexts to measure, in tokens: ``lengths``, or eight equal steps up to twice the (first run's)
    training length."""
    first = runs[0]
    if lengths:
        return sorted({length.tokens(first) for length in lengths})
    trained = trained_at(first)
    if trained is None:
        raise KinformerError(f"{first.folder}: does not say its training length; give `lengths` 64,128,192,256.")
    return sorted({max(1, 2 * trained * step // STEPS) for step in range(1, STEPS + 1)})


def _same_data(runs: Sequence[TrainedRun], evaluation_settings: EvaluationSettings, holdout: float | None) -> HeldOut:
    """Return the data that all are measured on, the first run's if none was named; all must have one tokenizer."""
    first = runs[0]
    for other in runs[1:]:
        if tokenizer_of(other).fingerprint != tokenizer_of(first).fingerprint:
            raise KinformerError(
                f"`recl` compares losses token by token, but {other.folder} and {first.folder} have different "
                "tokenizers; measure them separately."
            )
    return held_out(first, evaluation_settings, holdout)


def _losses(
    subject: LoadedRun,
    held: HeldOut,
    contexts: Sequence[int],
    chunk: int,
    task_options: NextTokenEvaluationOptions,
    quiet: bool,
) -> Losses:
    positions = spread_positions(held.split, contexts[-1], task_options.positions)
    with progressing(quiet) as progress:
        prefix = tokenizer_of(subject.run).prefix
        return context_losses(
            subject.model, held.split, contexts, positions, chunk=chunk, progress=progress, prefix=prefix
        )


def _facts(curves: Recl, losses: Losses) -> dict[str, object]:
    return {
        "at_least": curves.at_least,
        "gains": list(curves.gains),
        "mean_nats": losses.mean(axis=1).tolist(),
    }


def _blocks(
    names: Sequence[str], held: HeldOut, contexts: Sequence[int], curves: Sequence[Recl], hardest: str
) -> list[str | TextTable]:
    steps = [f"{one} to {two}" for one, two in zip(contexts, contexts[1:])]
    rows = [
        [name, f"{'at least ' if item.at_least else ''}{item.length}", *(f"{gain:.1%}" for gain in item.gains)]
        for name, item in zip(names, curves, strict=True)
    ]
    headers = ("run", "RECL", *steps)
    title = (
        f"relative effective context length on {held.corpus.name} {held.corpus.version}, {held.split.name} split: "
        f"the hardest {hardest} tokens\n"
    )
    return [title, TextTable(headers, rows, range(1, len(headers)))]
