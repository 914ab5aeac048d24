"""How well a model predicts the classes of examples, class by class."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import isfinite, log
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from kinformer.core.model import WholeModel, device_of
from kinformer.data import Buckets, Examples, Labelled
from kinformer.runtime.errors import choose, require_finite
from kinformer.runtime.progress import ProgressCallback, note, progressing
from kinformer.runtime.tables import PredictionTable
from kinformer.runtime.words import plural
from kinformer.tasks.classify.rows import LabelledBatch
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.classes import ClassPredictions, by_class, classes_of, numbers_of
from kinformer.tasks.shared.text import ends_of, heading, identity_of_part, note_other_data, tokenizer_of, whole_length
from kinformer.tasks.task import Source
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL

if TYPE_CHECKING:
    from kinformer.tasks.classify import Classify


@dataclass(frozen=True, kw_only=True)
class LabelMeasurement:
    """``bits`` per label; of each class its ``examples``, how often it was ``predicted``, and how often ``correct``."""

    bits: float
    examples: tuple[int, ...]
    predicted: tuple[int, ...]
    correct: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        """Return the share of examples whose class was predicted."""
        return sum(self.correct) / sum(self.examples)

    @property
    def guessing(self) -> float:
        """Return the share of the most frequent class: the accuracy of always predicting that one."""
        return max(self.examples) / sum(self.examples)


def measure_labels(
    model: WholeModel,
    rows: Buckets,
    classes: int,
    progress: ProgressCallback | None = None,
    predictions: ClassPredictions | None = None,
) -> LabelMeasurement:
    """Measure ``model`` (in eval mode) on all examples of ``rows``; ``predictions`` notes what it predicts of each."""
    device = device_of(model)
    counts, nats = np.zeros((3, classes), np.int64), 0.0
    with torch.inference_mode():
        for indices, some in zip(rows.batches(), rows.in_order(), strict=True):
            batch = LabelledBatch.of(some)
            valid = None if batch.valid is None else batch.valid.to(device)
            logits = model(batch.tokens.to(device), valid=valid).float().cpu()
            nats += float(functional.cross_entropy(logits, torch.from_numpy(some.labels), reduction="sum"))
            require_finite(isfinite(nats))
            guesses = logits.argmax(-1).numpy()
            if predictions is not None:
                predictions.note(indices, logits)
            right = some.labels[guesses == some.labels]
            counts += np.stack([np.bincount(item, minlength=classes) for item in (some.labels, guesses, right)])
            if progress is not None:
                progress(int(counts[0].sum()), len(rows.examples))
    examples, answers, correct = (tuple(row) for row in counts.tolist())
    return LabelMeasurement(bits=nats / log(2) / sum(examples), examples=examples, predicted=answers, correct=correct)


def evaluate(
    task: Classify, subject: LoadedRun, evaluation_settings: EvaluationSettings, table: PredictionTable, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out examples, class by class, beside the most frequent class; all predictions are
    written to the ``table`` that the options name."""
    run, model = subject.run, subject.model
    result, same, examples = _examples(task, subject, evaluation_settings)
    classes = classes_of(run)
    length = whole_length(run, model)
    ends = ends_of(model.config)
    if cut := result.cut(evaluation_settings.split, length - ends.size):
        note(f"note: {cut}.")
    rows = Buckets(examples, max(1, evaluation_settings.chunk // length), length, 0, ends)
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        predictions = None if table.predictions is None else ClassPredictions(len(examples))
        measured = measure_labels(model, rows, len(classes), progress, predictions)
    if predictions is not None:
        table.write_predictions(
            _input(task, run, examples, index) | row
            for index, row in enumerate(predictions.rows(examples.labels, classes))
        )
    counts, by_name = by_class(classes, measured, "examples")
    text = (
        heading(subject, result, evaluation_settings.split),
        f"accuracy {measured.accuracy:.1%}, {measured.bits:.4f} bits per label: {plural(len(examples), 'example')}, "
        f"{measured.guessing:.1%} are of the most frequent class\n",
        by_name,
    )
    metrics = {ACCURACY: measured.accuracy, BITS_PER_LABEL: measured.bits}
    baselines, identity = {"guessing": measured.guessing}, identity_of_part(result, evaluation_settings.split, same)
    facts = baselines | {"examples": len(examples), "length": length, "classes": counts}
    return evaluated(
        subject, metrics, identity, text, facts=facts, baselines=baselines, task=task.name, since=started_at
    )


def _input(task: Classify, run: TrainedRun, examples: Examples, index: int) -> dict[str, str]:
    """Return the text of an example, where the task's ids are those of a tokenizer."""
    return {"text": tokenizer_of(run).decode(examples.tokens(index))} if task.data.tokenized else {}


def _examples(
    task: Classify, subject: LoadedRun, evaluation_settings: EvaluationSettings
) -> tuple[Labelled, bool, Examples]:
    """Return the data, whether it is the run's own, and the part to measure on, with the run's numbers of classes."""
    run = subject.run
    spec = task.spec_to_measure(subject, evaluation_settings.data)
    source = Source(spec, run.data.get("holdout"), run.tokenizer, run.data.get("text_field"))
    examples = task.open(source, run.options)
    same = note_other_data(run, examples, evaluation_settings.data is not None)
    part = examples.splits[choose(evaluation_settings.split, examples.splits, "`split`")]
    return examples, same, replace(part, labels=numbers_of(run, examples.name, examples.classes)[part.labels])
