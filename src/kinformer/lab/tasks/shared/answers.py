"""Rows of which a causal model answers some tokens, made on demand or written as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.model import CausalModel
from kinformer.core.state import State, map_tensors
from kinformer.lab.data import IGNORED
from kinformer.lab.tasks.evaluation import Predicted, PredictionSettings
from kinformer.lab.tasks.shared.text import texts_in
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, take_rows
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import progressing

if TYPE_CHECKING:
    from kinformer.lab.data.labelled import TextItem, TextSource
    from kinformer.lab.tasks.next_token.generate import Generated
    from kinformer.lab.tasks.runs import LoadedRun


# Rows that are made on demand, of which a causal model answers some tokens (recall, algorithms).

PART_TOKENS = 2048
"""Tokens of the rows that are drawn with one seed: those of the usual chunk."""


class ScoredBatch(NamedTuple):
    """``tokens``, ``labels`` [batch, time] int64, IGNORED where nothing is scored; ``sizes`` [batch] int64: of every
    row's problem (pairs, digits); ``valid`` [batch, time] bool, or None for rows of one length."""

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
        """Return how many tokens are read, padding included."""
        return self.tokens.numel()

    @property
    def scored(self) -> Tensor:
        """Return behind which tokens an answer is scored, [batch, time] bool."""
        return self.labels != IGNORED


def drawn_batches(
    draw: Callable[[int, int], tuple[np.ndarray, ...]], rows: int, width: int, chunk: int
) -> Iterator[ScoredBatch]:
    """Yield ``rows`` rows of ``width`` tokens in batches of about ``chunk`` tokens.

    ``draw(part, count)`` gives the rows of a part, which holds as many whatever ``chunk`` is: the rows are the same.
    """
    part_rows, batch_rows = max(1, PART_TOKENS // width), max(1, chunk // width)
    for part, first in enumerate(range(0, rows, part_rows)):
        drawn = ScoredBatch.of(draw(part, min(part_rows, rows - first)))
        for begin in range(0, len(drawn.tokens), batch_rows):
            yield take_rows(drawn, slice(begin, begin + batch_rows))


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
    """Return what ``model`` predicts of the scored tokens."""
    scored = batch.scored
    inputs, state = model.head_inputs(batch.tokens, state, valid=batch.valid)
    logits = model.logits(map_tensors(lambda item: item[scored][None], inputs))[0]
    return Answers(logits.float(), batch.labels[scored], scored.nonzero()[:, 0], state)


class MadeRows(DataModule):
    """New rows in every step, the same rows in every validation."""

    def __init__(self, data: object, settings: Settings) -> None:
        self.data, self.settings = data, settings

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
        raise NotImplementedError


# Problems written as lines, each with one answer of a causal model (recall, algorithms).


def answers_to(
    source: TextSource,
    settings: PredictionSettings,
    check: Callable[[str], object],
    subject: LoadedRun,
    answer: Callable[..., Generated],
) -> Iterator[Predicted]:
    """Yield the answers to the problems of ``source``, one at a time, by ``answer(subject, text)``; ``check`` raises
    where a text is no problem."""

    def check_item(item: TextItem) -> None:
        try:
            check(item.text)
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    inputs = texts_in(source, settings, check_item)
    with progressing(settings.quiet or inputs.total is None, "predicting") as progress:
        for number, item in enumerate(inputs.items, start=1):
            text = answer(subject, item.text).samples[0].text
            label = {} if item.label is None else {"label": item.label}
            yield Predicted({"text": item.text} | label | {"answer": text}, f"{item.text}\t{text}")
            if progress is not None and inputs.total is not None:
                progress(number, inputs.total)
