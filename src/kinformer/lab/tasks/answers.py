"""Rows with some tokens for a causal model to answer, made on demand or written as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite, log
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State, map_tensors
from kinformer.lab.data import IGNORED
from kinformer.lab.data.labelled import TextItem, TextSource
from kinformer.lab.tasks.evaluation import (
    GenerationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    TextTable,
    TrainedRun,
    track,
)
from kinformer.lab.tasks.next_token import Generated
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.tasks.texts import texts_in
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, map_fields, take_rows
from kinformer.runtime.errors import KinformerError, require_finite

# Rows made on demand, with some tokens for a causal model to answer (recall, algorithms).

PART_TOKENS = 2048
"""Tokens of the rows drawn with one seed: as many as in the usual chunk."""


class ScoredBatch(NamedTuple):
    """``tokens``, ``labels`` [batch, time] int64, IGNORED where nothing is scored; ``sizes`` [batch] int64, the size of
    every row's problem (pairs, digits); ``valid`` [batch, time] bool, or None for rows of one length."""

    tokens: Tensor
    labels: Tensor
    sizes: Tensor
    valid: Tensor | None = None

    @classmethod
    def of(cls, rows: tuple[np.ndarray, ...]) -> ScoredBatch:
        """Make a batch of a reader's rows, which have these fields."""
        return cls(*map(torch.from_numpy, rows))

    @property
    def size(self) -> int:
        return self.tokens.numel()

    @property
    def scored(self) -> Tensor:
        """Return the tokens after which an answer is scored, [batch, time] bool."""
        return self.labels != IGNORED


class Answers(NamedTuple):
    """A model's answers: ``logits`` [tokens, symbols] in float32, ``labels`` and ``rows`` of every scored token, and
    the ``state`` after the batch."""

    logits: Tensor
    labels: Tensor
    rows: Tensor
    state: State

    @property
    def nats(self) -> Tensor:
        """Return the sum of the cross-entropies of all answers."""
        return functional.cross_entropy(self.logits, self.labels, reduction="sum")

    @property
    def right(self) -> Tensor:
        """Return which labels are the most probable tokens, [tokens] bool."""
        return self.logits.detach().argmax(-1) == self.labels


def answers(model: CausalModel, batch: ScoredBatch, state: State = None) -> Answers:
    """Return the predictions of ``model`` for the scored tokens."""
    scored = batch.scored
    inputs, state = model.head_inputs(batch.tokens, state, valid=batch.valid)
    logits = model.logits(map_tensors(lambda item: item[scored][None], inputs))[0]
    return Answers(logits.float(), batch.labels[scored], scored.nonzero()[:, 0], state)


def answered_batches(
    model: CausalModel, draw: Callable[[int, int], tuple[np.ndarray, ...]], rows: int, width: int, chunk: int
) -> Iterator[tuple[ScoredBatch, Answers]]:
    """Yield ``rows`` rows of ``width`` tokens in batches of about ``chunk`` tokens, with the answers of ``model``.
    ``draw(part, count)`` gives the rows of a part. The size of a part does not depend on ``chunk``, and so the rows do
    not."""
    part_rows, batch_rows = max(1, PART_TOKENS // width), max(1, chunk // width)
    for part, first in enumerate(range(0, rows, part_rows)):
        drawn = ScoredBatch.of(draw(part, min(part_rows, rows - first)))
        for begin in range(0, len(drawn.tokens), batch_rows):
            batch = take_rows(drawn, slice(begin, begin + batch_rows))
            yield batch, answers(model, map_fields(batch, lambda field: field.to(device_of(model))))


class MadeRows(DataModule):
    """New rows in every step, the same rows in every validation."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.data, self.settings = plan.data, plan.settings

    @property
    def width(self) -> int:
        """Return the number of tokens in a row."""
        raise NotImplementedError

    def made(self, split: str, part: int, seed: int) -> tuple[np.ndarray, ...]:
        """Return the rows of one batch of all processes."""
        raise NotImplementedError

    @property
    def validations(self) -> int:
        return max(1, self.settings.validation_tokens // (self.settings.batch_size * self.width))

    def batch(self, step: int, rank: int, world: int) -> ScoredBatch:
        return self._share(self.made("train", step, self.settings.seed), rank, world)

    def validation(self, rank: int, world: int) -> Iterator[ScoredBatch]:
        for part in range(self.validations):
            yield self._share(self.made("validation", part, 0), rank, world)

    def baselines(self) -> dict[str, float]:
        batches = list(self.validation(0, 1))
        scored = torch.cat([batch.labels[batch.scored] for batch in batches])
        sizes = torch.cat([batch.sizes[batch.scored.nonzero()[:, 0]] for batch in batches])
        return self.guessed(scored, sizes)

    def guessed(self, labels: Tensor, sizes: Tensor) -> dict[str, float]:
        """Return the accuracy of guessing the scored ``labels`` [tokens] of problems with ``sizes`` [tokens]."""
        raise NotImplementedError

    def _share(self, rows: tuple[np.ndarray, ...], rank: int, world: int) -> ScoredBatch:
        share = self.settings.batch_size // world
        return ScoredBatch.of(tuple(field[rank * share : (rank + 1) * share] for field in rows))


class AnswersLoss:
    """The mean cross-entropy of the scored tokens, each predicted from the right ones before it."""

    reads_hidden = True

    def __call__(self, model: CausalModel, batch: ScoredBatch, state: State, progress: float) -> ObjectiveOutput:
        answered = answers(model, batch, state)
        nats, right, labels_scored = answered.nats, answered.right, len(answered.labels)
        counts = {"predicted": torch.full_like(right.sum(), labels_scored), "correct": right.sum()}
        metrics = {"nats": nats.detach(), **counts, **self.counted(batch, answered.rows, right)}
        return nats / max(1, labels_scored), metrics, answered.state

    def counted(self, batch: ScoredBatch, rows: Tensor, right: Tensor) -> dict[str, Tensor]:
        """Return further sums, of ``right`` answers [tokens] in ``rows`` [tokens]."""
        return {}


# Problems written as lines, each with one answer of a causal model (recall, algorithms).


def answers_to(
    source: TextSource,
    settings: PredictionSettings,
    check: Callable[[str], object],
    subject: LoadedRun,
    answer: Callable[..., Generated],
) -> Iterator[Predicted]:
    """Yield the answers to the problems of ``source``, one at a time, by ``answer(subject, text, settings)``; ``check``
    raises for a text without a problem."""

    def check_item(item: TextItem) -> None:
        try:
            check(item.text)
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    inputs = texts_in(source, settings, check_item)
    for item in track(inputs.items, inputs.total, settings.quiet, "predicting"):
        text = answer(subject, item.text, GenerationSettings()).samples[0].text
        yield Predicted.of(item, f"{item.text}\t{text}", answer=text)


def classes_of(run: TrainedRun) -> list[str]:
    """The names of the classes that a run predicts."""
    classes = (run.data.get("identity") or {}).get("classes")
    if not isinstance(classes, list):
        raise KinformerError(f"{run.folder}: does not say which classes it predicts; measure the run that was trained.")
    return classes


def numbers_of(run: TrainedRun, name: str, classes: Sequence[str]) -> np.ndarray:
    """The numbers that ``run`` gave to the ``classes`` of the data called ``name``, in their order."""
    learnt = classes_of(run)
    if strange := [item for item in classes if item not in learnt]:
        raise KinformerError(
            f"{name}: has the class {strange[0]!r}, which {run.folder} was not trained to predict; it predicts "
            f"{', '.join(learnt)}."
        )
    return np.array([learnt.index(item) for item in classes], np.int64)


class LabelMeasurement:
    """The predicted ``answers`` int64 [items] to ``labels`` [items], numbers below ``classes``, the ``shares`` of their
    probability, and the ``nats`` of all labels."""

    def __init__(self, labels: np.ndarray, classes: int) -> None:
        self.labels, self.classes, self.nats = labels.astype(np.int64), classes, 0.0
        self.answers, self.shares = np.zeros(len(labels), np.int64), np.zeros(len(labels))

    def note(self, indices: np.ndarray, logits: Tensor) -> None:
        """Note the predictions of the items ``indices`` [n] by their ``logits`` [n, classes]."""
        labels = torch.from_numpy(self.labels[indices])
        self.nats += float(functional.cross_entropy(logits, labels, reduction="sum"))
        require_finite(isfinite(self.nats))
        shares, answers = logits.softmax(-1).max(-1)
        self.answers[indices], self.shares[indices] = answers.numpy(), shares.double().numpy()

    @property
    def bits(self) -> float:
        """Return the mean bits per label."""
        return self.nats / log(2) / len(self.labels)

    @property
    def right(self) -> np.ndarray:
        """Return which answers are right, [items] bool."""
        return self.answers == self.labels

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return float(self.right.mean())

    @property
    def guessing(self) -> float:
        """Return the share of the most frequent class: the accuracy of always predicting that one."""
        return max(self.counts[0]) / len(self.labels)

    @property
    def counts(self) -> list[list[int]]:
        """Return how many items there are of every class, how often it was predicted, and how often rightly."""
        some = (self.labels, self.answers, self.labels[self.right])
        return [np.bincount(items, minlength=self.classes).tolist() for items in some]

    def by_class(self, names: Sequence[str], things: str) -> tuple[list[dict[str, object]], TextTable]:
        """Return the ``counts`` of the classes called ``names``, of ``things``, as JSON and as a table."""
        headers = ("class", things, "predicted", "correct")
        rows = list(zip(names, *self.counts, strict=True))
        return [dict(zip(headers, row, strict=True)) for row in rows], TextTable(headers, rows, range(1, 4))

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield the answer to every item beside its label, as a row of a table."""
        for label, answer, share in zip(self.labels.tolist(), self.answers.tolist(), self.shares.tolist(), strict=True):
            yield {"label": names[label], "class": names[answer], "probability": share}


ClassProbability = TypedDict("ClassProbability", {"class": str, "probability": float})
"""A class with its probability, as JSON holds it."""


def most_probable(probabilities: Tensor, names: Sequence[str], top_k: int) -> list[ClassProbability]:
    """The ``top_k`` most probable classes of ``probabilities`` [classes], the most probable first."""
    best = probabilities.topk(min(top_k, len(names)))
    return [
        {"class": names[index], "probability": share}
        for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def spell_classes(classes: Sequence[ClassProbability]) -> str:
    """Return classes with their probabilities, for people."""
    return ", ".join(f"{item['class']} {item['probability']:.1%}" for item in classes)
