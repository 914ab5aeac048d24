"""The task of classification: its rows, its objective, its measures, and the classes of new texts.

A training row is a text with one label; the task listops reads trees in the same way. Padding is 0 and not valid. An
encoder predicts the label from the whole row. A causal model predicts it from the state of the last valid token, as
GPT-like models are fine-tuned (Radford et al. 2018):

    tokens   BOS  f  i  n  e  EOS  0  0
    valid     1   1  1  1  1   1   0  0
    label    1                             the class "good"; IGNORED in rows that do not count
    labels    -   -  -  -  -   1   -  -    for a causal model; "-" is IGNORED
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import CausalModel, WholeModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.lab.data import IGNORED, BosEos, Buckets, Examples, Labelled, Rows, Tokenizer, open_labelled
from kinformer.lab.data.labelled import TextItem, TextSource, refuse_empty
from kinformer.lab.data.listops import open_listops, read
from kinformer.lab.tables import PredictionTable
from kinformer.lab.tasks.answers import LabelMeasurement, classes_of, most_probable, numbers_of, spell_classes
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    track,
)
from kinformer.lab.tasks.options import ClassifyOptions, ListOpsOptions
from kinformer.lab.tasks.task import NoOptions, Source, TrainingPlan
from kinformer.lab.tasks.texts import (
    SPECIAL_TOKENS,
    HeldOut,
    TextReader,
    check_ids,
    ends_of,
    spec_of,
    texts_in,
    tokenizer_of,
    vocabulary_for,
    whole_length,
)
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, stretch_of_rows
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.progress import note

# The data of the tasks classify and listops, and how a model is fitted to its classes.

LISTOPS = "listops"
HEAD, CAUSAL_HEAD, FEWEST = "classification", "token_classification", 2
NGRAMS = "character_ngrams"
SHOWN = 8
"""How many classes a note counts, the most frequent first."""


def open_examples(source: Source, options: ClassifyOptions | ListOpsOptions, cache: Path | None = None) -> Labelled:
    """Return the labelled examples that ``source`` names, or lists of the ``options``."""
    if isinstance(options, ListOpsOptions):
        return open_listops(options.examples, options.bounds, cache=cache)
    fields = {"text_field": source.text_field, "label_field": options.label_field}
    return open_labelled(source.spec, cache=cache, tokenizer=source.tokenizer, holdout=source.holdout, **fields)


def default_vocabulary(source: Source, options: ClassifyOptions) -> int | None:
    """Return the size of a new vocabulary for the examples; None for bytes."""
    return vocabulary_for(int(open_examples(source, options).splits["train"].lengths.sum()))


def texts_of(source: Source, options: ClassifyOptions) -> Iterator[str]:
    """Return the texts of the training split."""
    train = open_examples(source, options).splits["train"]
    return (bytes(train.tokens(index)).decode("utf-8", "replace") for index in range(len(train)))


def vocab_size(data: Labelled) -> int:
    """Return how many ids a model of the examples must know."""
    return data.vocab_size + SPECIAL_TOKENS


def row_lengths(data: Labelled, config: ModelConfig) -> np.ndarray:
    """Return the tokens of each training example, BOS and EOS included."""
    return data.splits["train"].lengths + ends_of(config).size


def fit(config: ModelConfig, data: Labelled | None) -> dict[str, object]:
    """Return the overrides: a head for the classes of the data. A causal model gets the head of transformers' causal
    classifiers, a product without a bias at every position."""
    classes = FEWEST if data is None else len(data.classes)
    if config.protocol is CausalModel:
        return {"head": {"kind": CAUSAL_HEAD, "classes": classes, "bias": False}}
    if config.head.kind == HEAD:
        return {"head.classes": classes, "head.multi_label": False}
    return {"head": {"kind": HEAD, "classes": classes}}


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the ids of the data, and a column of a table without classes."""
    data: Labelled = plan.data
    check_ids(plan, model, data.vocab_size, special_apart=isinstance(plan.options, ListOpsOptions))
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
    def of(cls, rows: Rows, at_last: bool = False) -> LabelledBatch:
        """Make a batch of padded rows; with ``at_last``, a row's label is the label of its last valid token."""
        tokens, valid, labels = (None if field is None else torch.from_numpy(field) for field in rows[:3])
        assert tokens is not None and labels is not None
        if at_last:
            place = last_valid(tokens, valid)[:, None]
            labels = torch.full_like(tokens, IGNORED).scatter(1, place, labels[:, None])
        return cls(tokens, valid, labels)

    @property
    def size(self) -> int:
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

    def __init__(
        self,
        data: Labelled,
        settings: Settings,
        ends: BosEos,
        at_last: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.data, self.at_last, self.tokenizer = data, at_last, tokenizer
        sizes = settings.batch_size, settings.length, settings.seed
        self.train, self.held_out = (Buckets(data.splits[name], *sizes, ends) for name in ("train", "validation"))
        enough = int(np.searchsorted(np.cumsum(self.held_out.lengths), settings.validation_tokens)) + 1
        self.examples = min(len(self.held_out.lengths), max(LEAST_EXAMPLES, enough))

    @property
    def validations(self) -> int:
        return -(-self.examples // self.held_out.batch_size)

    def batch(self, step: int, rank: int, world: int) -> LabelledBatch:
        return LabelledBatch.of(self.train.batch(step, rank, world), self.at_last)

    def validation(self, rank: int, world: int) -> Iterator[LabelledBatch]:
        for rows in self.held_out.in_order(self.examples):
            yield LabelledBatch.of(rows.share(rank, world), self.at_last)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}

    def baselines(self) -> dict[str, float]:
        train, held_out = self.data.splits["train"], self.held_out.examples
        held_out = replace(held_out, labels=held_out.labels[: self.examples])
        return simple_rules(train, held_out, self.tokenizer)


def training_rows(plan: TrainingPlan) -> Labels:
    """Return the rows of training."""
    tokenizer = None if isinstance(plan.options, ListOpsOptions) else plan.tokenizer
    causal = plan.config.protocol is CausalModel
    return Labels(plan.data, plan.settings, ends_of(plan.config), causal, tokenizer)


def simple_rules(train: Examples | None, measured: Examples, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Return the accuracy on the examples ``measured`` of always predicting the most frequent class and, for texts of a
    ``tokenizer``, of character n-grams learnt from ``train``. Without scikit-learn the n-grams are left out, with a
    note."""
    counts = np.bincount(measured.labels)
    rules = {"guessing": float(counts.max() / counts.sum())}
    if tokenizer is None or train is None:
        return rules
    if find_spec("sklearn") is None:
        note(
            "note: the baseline is the most frequent class alone; pip install 'kinformer[classify]' adds "
            "character n-grams with logistic regression."
        )
        return rules
    from kinformer.lab.evaluation.character_ngrams import accuracy

    return rules | {NGRAMS: accuracy(train, measured, tokenizer.decode)}


class Classification:
    """Mean cross-entropy of the label of every row, or of every token where the model classifies tokens."""

    by_token = True

    def __call__(self, model: nn.Module, batch: LabelledBatch, state: object, progress: float) -> ObjectiveOutput:
        outputs = model(batch.tokens, valid=batch.valid)
        if isinstance(outputs, Tensor):
            return scored(outputs, batch.labels)
        loss, metrics, _ = scored(outputs[0], batch.labels)
        return loss, metrics, outputs[1]


def scored(logits: Tensor, labels: Tensor) -> ObjectiveOutput:
    """Return loss, metrics and no state from logits [..., classes] and labels [...]; ``correct`` counts the labels
    whose class is the most probable one."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten()
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    counted = (labels != IGNORED).sum()
    correct = (logits.detach().argmax(-1) == labels).sum()
    return nats / counted.clamp_min(1), {"nats": nats.detach(), "predicted": counted, "correct": correct}, None


def last_valid(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Return the place of the last valid token of each row, int64 [batch]; valid tokens are the first of their rows."""
    return tokens.new_full((len(tokens),), tokens.shape[1] - 1) if valid is None else valid.sum(1) - 1


def class_logits(model: CausalModel | WholeModel, tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Return the logits [batch, classes] of rows: of an encoder, or of a causal model at the last valid token."""
    outputs = model(tokens, valid=valid)
    if isinstance(outputs, Tensor):
        return outputs
    return outputs[0][torch.arange(len(tokens), device=tokens.device), last_valid(tokens, valid)]


# How well a model predicts the classes of examples, class by class.


def measure_labels(
    model: CausalModel | WholeModel, rows: Buckets, classes: int, quiet: bool = True
) -> LabelMeasurement:
    """Measure ``model`` (in eval mode) on all examples of ``rows``."""
    device, measured = device_of(model), LabelMeasurement(rows.examples.labels, classes)
    batches = zip(rows.batches(), rows.in_order(), strict=True)
    with torch.inference_mode():
        for indices, some in track(batches, len(rows.examples), quiet, size=lambda batch: len(batch[0])):
            batch = LabelledBatch.of(some)
            valid = None if batch.valid is None else batch.valid.to(device)
            measured.note(indices, class_logits(model, batch.tokens.to(device), valid).float().cpu())
    return measured


def evaluate(subject: LoadedRun, settings: EvaluationSettings, table: PredictionTable, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out examples, class by class, beside the most frequent class; all predictions are
    written to the ``table`` that the options name."""
    run, model = subject.run, subject.model
    if getattr(model.config.head, "multi_label", False):
        raise KinformerError(
            f"{run.folder}: its texts may have several classes, which examples with one label do not measure; predict."
        )
    held, train = _examples(subject, settings)
    classes, length, ends, examples = classes_of(run), whole_length(run, model), ends_of(model.config), held.split
    if cut := held.data.cut(settings.split, length - ends.size):
        note(f"note: {cut}.")
    longest = min(length, int(examples.lengths.max()) + ends.size)  # short texts are read many at a time
    rows = Buckets(examples, max(1, settings.chunk // longest), length, 0, ends)
    started_at = time.perf_counter()
    measured = measure_labels(model, rows, len(classes), quiet)
    spelled = not isinstance(run.options, ListOpsOptions)  # the ids are a tokenizer's
    table.write_predictions(
        ({"text": tokenizer_of(run).decode(examples.tokens(index))} if spelled else {}) | row
        for index, row in enumerate(measured.rows(classes))
    )
    counts, by_name = measured.by_class(classes, "examples")
    baselines = simple_rules(train, examples, tokenizer_of(run) if spelled else None)
    ngrams = baselines.get(NGRAMS)
    beside = "" if ngrams is None else f", character n-grams with logistic regression have {ngrams:.1%}"
    wins = "" if ngrams is None or ngrams <= measured.accuracy else f"; character n-grams win with {ngrams:.1%}"
    text = (
        f"accuracy {measured.accuracy:.1%}, {measured.bits:.4f} bits per label: {plural(len(examples), 'example')}, "
        f"{measured.guessing:.1%} are of the most frequent class{beside}\n",
        by_name,
    )
    metrics = {ACCURACY: measured.accuracy, BITS_PER_LABEL: measured.bits}
    facts = baselines | {"examples": len(examples), "length": length, "classes": counts}
    task = "classify" if spelled else LISTOPS
    more: dict[str, Any] = {"facts": facts, "baselines": baselines, "task": task, "since": started_at}
    return held.report(subject, metrics, text, ending=wins, **more)


def _examples(subject: LoadedRun, settings: EvaluationSettings) -> tuple[HeldOut, Examples | None]:
    """Return the part to measure on and the run's training examples, with the run's numbers of classes; None where the
    training data has gone."""
    run = subject.run

    def opened(spec: str) -> Labelled:
        return open_examples(
            Source(spec, run.data.get("holdout"), run.tokenizer, run.data.get("text_field")), run.options
        )

    listops = LISTOPS if isinstance(run.options, ListOpsOptions) else None
    trained_on = data = opened(listops or spec_of(run, settings.data))
    held = HeldOut.of(run, settings, data)
    if not held.same:
        with suppress(KinformerError):
            trained_on = opened(listops or spec_of(run, None))
    numbers = numbers_of(run, data.name, data.classes)
    train = trained_on.splits["train"]
    train = replace(train, labels=numbers[train.labels]) if held.same else train
    there = trained_on.fingerprint == (run.data.get("identity") or {}).get("fingerprint")
    return replace(held, split=replace(held.split, labels=numbers[held.split.labels])), train if there else None


# The most probable classes of texts.


class TextClassifier(TextReader):
    """A run that predicts the classes of texts, which are cut as evaluation cuts them."""

    def __init__(self, subject: LoadedRun, top_k: int) -> None:
        super().__init__(subject.run, subject.model, ends_of(subject.model.config))
        self.run, self.names, self.top_k = subject.run, classes_of(subject.run), top_k

    def encode(self, item: TextItem) -> np.ndarray:
        if isinstance(self.run.options, ListOpsOptions):
            return read(item.text, item.place)
        refuse_empty(item)
        return tokenizer_of(self.run).encode(item.text)

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Predicted]:
        tokens, valid = self.lay([ids for _, ids in batch])
        with torch.inference_mode():
            logits = class_logits(self.model, tokens, valid).float().cpu()
        require_finite(bool(logits.isfinite().all()))
        several = getattr(self.model.config.head, "multi_label", False)
        shares = logits.sigmoid() if several else logits.softmax(-1)
        rows = (most_probable(row, self.names, self.top_k) for row in shares)
        return [
            Predicted.of(item, f"{spell_classes(classes)}\t{item.text}", classes=classes)
            for (item, _), classes in zip(batch, rows, strict=True)
        ]


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield the classes of the texts of ``source``, in order."""
    classifier = TextClassifier(subject, settings.top_k)
    yield from classifier.read(texts_in(source, settings, classifier.encode), settings)
