"""The task of classification: its rows, its objective, its measures, and the classes of new texts.

A training row is a text with one label; the task listops reads trees in the same way. Padding is 0 and not valid:

    tokens   BOS  f  i  n  e  EOS  0  0
    valid     1   1  1  1  1   1   0  0
    label    1                             the class "good"; IGNORED in rows that do not count
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, log
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import WholeModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.lab.data import IGNORED, BosEos, Buckets, Examples, Labelled, Rows, open_labelled
from kinformer.lab.data.labelled import TextItem, TextSource, refuse_empty
from kinformer.lab.data.listops import open_listops, read
from kinformer.lab.tasks.answers import (
    ClassPredictions,
    ClassProbability,
    LabelMeasurement,
    by_class,
    classes_of,
    most_probable,
    numbers_of,
    spell_classes,
)
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    TrainedRun,
    evaluated,
    in_batches,
)
from kinformer.lab.tasks.options import ClassifyOptions, ListOpsOptions
from kinformer.lab.tasks.task import NoOptions, Source, TrainingPlan
from kinformer.lab.tasks.texts import (
    SPECIAL_TOKENS,
    TextReader,
    check_ids,
    check_sequence,
    ends_of,
    heading,
    identity_of_part,
    note_other_data,
    spec_of,
    texts_in,
    tokenizer_of,
    whole_length,
)
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, stretch_of_rows
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, choose, plural, require_finite
from kinformer.runtime.progress import ProgressCallback, note, progressing
from kinformer.runtime.tables import PredictionTable

# The data of the tasks classify and listops, and how an encoder is fitted to its classes.

LISTOPS = "listops"
HEAD, FEWEST = "classification", 2
SHOWN = 8
"""How many classes a note counts, the most frequent first."""


def open_examples(source: Source, options: ClassifyOptions | ListOpsOptions, cache: Path | None = None) -> Labelled:
    """Return the labelled examples that ``source`` names, or lists of the ``options``."""
    if isinstance(options, ListOpsOptions):
        return open_listops(options.examples, options.bounds, cache=cache)
    return open_labelled(
        source.spec,
        cache=cache,
        tokenizer=source.tokenizer,
        holdout=source.holdout,
        text_field=source.text_field,
        label_field=options.label_field,
    )


def vocab_size(data: Labelled) -> int:
    """Return how many ids an encoder of the examples must know."""
    return data.vocab_size + SPECIAL_TOKENS


def row_lengths(data: Labelled, config: ModelConfig) -> np.ndarray:
    """Return the tokens of each training example, BOS and EOS included."""
    return data.splits["train"].lengths + ends_of(config).size


def fit(config: ModelConfig, data: Labelled | None) -> dict[str, object]:
    """Return the overrides: a head for the classes of the data."""
    classes = FEWEST if data is None else len(data.classes)
    if config.head.kind == HEAD:
        return {"head.classes": classes}
    return {"head": {"kind": HEAD, "classes": classes}}


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the ids of the data, and a column of a table without classes."""
    data: Labelled = plan.data
    check_ids(plan, data.vocab_size, special_apart=isinstance(plan.options, ListOpsOptions))
    check_sequence(model)
    examples = len(data.splits["train"])
    if isinstance(plan.options, ClassifyOptions) and 2 * len(data.classes) > examples:
        columns = f" ({data.columns})" if data.columns else ""
        raise KinformerError(
            f"`data`: {data.name} has {plural(len(data.classes), 'class')} but only {plural(examples, 'example')} "
            f"to train on{columns}; say by `text_field` and `label_field` which columns are the text and the "
            "label, or give more examples of every class."
        )


def tell(plan: TrainingPlan) -> None:
    """Note the classes and how many examples are cut to the length of rows."""
    data: Labelled = plan.data
    counts = Counter(data.splits["train"].labels.tolist()).most_common()
    shown = ", ".join(f"{data.classes[number]}: {count:,}" for number, count in counts[:SHOWN])
    more = f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
    columns = f"; {data.columns}" if data.columns else ""
    note(f"note: {data.name}: {plural(len(data.classes), 'class')} to train on, {shown}{more}{columns}.")
    if cut := data.cut("train", plan.settings.length - ends_of(plan.config).size):
        note(f"note: {cut}; `length` {plan.settings.length} can be raised.")


# Rows of labelled examples for an encoder, and the objective of their classes.

LEAST_EXAMPLES = 256


class LabelledBatch(NamedTuple):
    """``tokens`` [batch, time] int64, ``valid`` bool or None, and the ``labels`` int64 [batch] of rows, or [batch,
    time] of tokens; IGNORED labels do not count."""

    tokens: Tensor
    valid: Tensor | None
    labels: Tensor

    @classmethod
    def of(cls, rows: Rows) -> LabelledBatch:
        """Make a batch of padded rows and their labels."""
        valid = None if rows.valid is None else torch.from_numpy(rows.valid)
        return cls(torch.from_numpy(rows.tokens), valid, torch.from_numpy(rows.labels))

    @property
    def size(self) -> int:
        """Return the number of tokens read, padding included."""
        return self.tokens.numel()

    def stretch(self, number: int, count: int) -> LabelledBatch:
        """Return stretch ``number`` of ``count`` of the rows' time; labels of whole rows count in every row once."""
        tokens, valid = stretch_of_rows(self.tokens, self.valid, number, count)
        if self.labels.dim() > 1:
            lacking = tokens.shape[1] * count - self.tokens.shape[1]
            labels = functional.pad(self.labels, (0, lacking), value=IGNORED)
            return LabelledBatch(tokens, valid, labels[:, number * tokens.shape[1] : (number + 1) * tokens.shape[1]])
        here = torch.arange(len(tokens), device=tokens.device) % count == number
        return LabelledBatch(tokens, valid, self.labels.masked_fill(~here, IGNORED))


class Labels(DataModule):
    """Examples with their classes. Validation: the first ones, of as many tokens as the settings say, 256 at least."""

    sums = ("nats", "correct")
    by_time = True
    metrics = (ACCURACY, BITS_PER_LABEL)

    def __init__(self, data: Labelled, settings: Settings, ends: BosEos) -> None:
        sizes = settings.batch_size, settings.length, settings.seed
        self.train, self.held_out = (Buckets(data.splits[name], *sizes, ends) for name in ("train", "validation"))
        enough = int(np.searchsorted(np.cumsum(self.held_out.lengths), settings.validation_tokens)) + 1
        self.examples = min(len(self.held_out.lengths), max(LEAST_EXAMPLES, enough))

    @property
    def validations(self) -> int:
        return -(-self.examples // self.held_out.batch_size)

    def batch(self, step: int, rank: int, world: int) -> LabelledBatch:
        return LabelledBatch.of(self.train.batch(step, rank, world))

    def validation(self, rank: int, world: int) -> Iterator[LabelledBatch]:
        for rows in self.held_out.in_order(self.examples):
            yield LabelledBatch.of(rows.share(rank, world))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}


def training_rows(plan: TrainingPlan) -> Labels:
    """Return the rows of training."""
    return Labels(plan.data, plan.settings, ends_of(plan.config))


class Classification:
    """Mean cross-entropy of the label of every row, or of every token where the model predicts the classes of
    tokens."""

    by_token = True

    def __call__(self, model: nn.Module, batch: LabelledBatch, state: object, progress: float) -> ObjectiveOutput:
        return scored(model(batch.tokens, valid=batch.valid), batch.labels)


def scored(logits: Tensor, labels: Tensor) -> ObjectiveOutput:
    """Return loss, metrics and no state from logits [..., classes] and labels [...]; ``correct`` counts the labels
    whose class is the most probable one."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten()
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    counted = (labels != IGNORED).sum()
    correct = (logits.detach().argmax(-1) == labels).sum()
    return nats / counted.clamp_min(1), {"nats": nats.detach(), "predicted": counted, "correct": correct}, None


# How well a model predicts the classes of examples, class by class.


def measure_labels(
    model: WholeModel,
    rows: Buckets,
    classes: int,
    progress: ProgressCallback | None = None,
    predictions: ClassPredictions | None = None,
) -> LabelMeasurement:
    """Measure ``model`` (in eval mode) on all examples of ``rows``; ``predictions`` notes the prediction of each
    example."""
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


def evaluate(subject: LoadedRun, settings: EvaluationSettings, table: PredictionTable, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out examples, class by class, beside the most frequent class; all predictions are
    written to the ``table`` that the options name."""
    run, model = subject.run, subject.model
    result, same, examples = _examples(subject, settings)
    classes = classes_of(run)
    length = whole_length(run, model)
    ends = ends_of(model.config)
    if cut := result.cut(settings.split, length - ends.size):
        note(f"note: {cut}.")
    rows = Buckets(examples, max(1, settings.chunk // length), length, 0, ends)
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        predictions = None if table.predictions is None else ClassPredictions(len(examples))
        measured = measure_labels(model, rows, len(classes), progress, predictions)
    spelled = not isinstance(run.options, ListOpsOptions)  # the ids are a tokenizer's
    if predictions is not None:
        table.write_predictions(
            ({"text": tokenizer_of(run).decode(examples.tokens(index))} if spelled else {}) | row
            for index, row in enumerate(predictions.rows(examples.labels, classes))
        )
    counts, by_name = by_class(classes, measured, "examples")
    text = (
        heading(subject, result, settings.split),
        f"accuracy {measured.accuracy:.1%}, {measured.bits:.4f} bits per label: {plural(len(examples), 'example')}, "
        f"{measured.guessing:.1%} are of the most frequent class\n",
        by_name,
    )
    metrics = {ACCURACY: measured.accuracy, BITS_PER_LABEL: measured.bits}
    baselines, identity = {"guessing": measured.guessing}, identity_of_part(result, settings.split, same)
    facts = baselines | {"examples": len(examples), "length": length, "classes": counts}
    task = "classify" if spelled else LISTOPS
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task=task, since=started_at)


def _examples(subject: LoadedRun, settings: EvaluationSettings) -> tuple[Labelled, bool, Examples]:
    """Return the data, whether it is the run's own, and the part to measure on, with the run's numbers of classes."""
    run = subject.run
    spec = LISTOPS if isinstance(run.options, ListOpsOptions) else spec_of(run, settings.data)
    source = Source(spec, run.data.get("holdout"), run.tokenizer, run.data.get("text_field"))
    examples = open_examples(source, run.options)
    same = note_other_data(run, examples, settings.data is not None)
    part = examples.splits[choose(settings.split, examples.splits, "`split`")]
    return examples, same, replace(part, labels=numbers_of(run, examples.name, examples.classes)[part.labels])


# The most probable classes of texts.


class TextClassifier(TextReader):
    """A run that predicts the classes of texts, which are cut as evaluation cuts them."""

    def __init__(self, subject: LoadedRun, top_k: int) -> None:
        super().__init__(subject.run, subject.model, ends_of(subject.model.config))
        self.names, self.top_k = classes_of(subject.run), top_k

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Predicted]:
        """Return the predictions of texts that come with their ids."""
        tokens, valid = self.lay([ids for _, ids in batch])
        with torch.inference_mode():
            logits = cast(Tensor, self.model(tokens, valid=valid)).float().cpu()
        require_finite(bool(logits.isfinite().all()))
        return [
            _predicted(item, most_probable(row, self.names, self.top_k))
            for (item, _), row in zip(batch, logits.softmax(-1), strict=True)
        ]


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield the classes of the texts of ``source``, in order."""
    encode = encoder_of(subject.run)
    classifier = TextClassifier(subject, settings.top_k)
    inputs = texts_in(source, settings, encode)
    pairs = ((item, encode(item)) for item in inputs.items)
    yield from in_batches(
        pairs, settings.batch_size, lambda pair: len(pair[1]), classifier, inputs.total, settings.quiet
    )
    classifier.note_cut()


def encoder_of(run: TrainedRun) -> Callable[[TextItem], np.ndarray]:
    """Return a function that makes ids of a text, and raises for a text that the run cannot read."""
    if isinstance(run.options, ListOpsOptions):
        return lambda item: read(item.text, item.place)
    tokenizer = tokenizer_of(run)

    def encode(item: TextItem) -> np.ndarray:
        refuse_empty(item)
        return tokenizer.encode(item.text)

    return encode


def _predicted(item: TextItem, classes: list[ClassProbability]) -> Predicted:
    label = {} if item.label is None else {"label": item.label}
    return Predicted({"text": item.text} | label | {"classes": classes}, f"{spell_classes(classes)}\t{item.text}")
