"""Rows of text for a causal model, and the objective of the next token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.model import CausalModel, StackedCausalModel
from kinformer.core.state import State
from kinformer.data import Corpus, EvaluationStream, RandomWindows, SegmentStreams, Split
from kinformer.data.mixture import MixedWindows
from kinformer.training import cross_entropy
from kinformer.training.data_module import DataModule
from kinformer.training.metric import BITS_PER_BYTE
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings


class TokenBatch(NamedTuple):
    """``tokens`` [batch, time + 1] int64, inputs and, one later, targets; ``reset`` and ``valid`` [batch, time] bool or
    None."""

    tokens: Tensor
    reset: Tensor | None = None
    valid: Tensor | None = None

    @property
    def size(self) -> int:
        """Return how many tokens are predicted."""
        rows, width = self.tokens.shape
        return rows * (width - 1)

    def stretch(self, number: int, count: int) -> TokenBatch:
        """Return stretch ``number`` of ``count`` of the rows' time, which is padded to a multiple of ``count``."""
        time = self.tokens.shape[1] - 1
        size = -(-time // count)
        valid, lacking = self.valid, size * count - time
        if lacking and valid is None:
            valid = torch.ones_like(self.tokens[:, 1:], dtype=torch.bool)
        begin, end = number * size, (number + 1) * size
        marks = (
            None if mark is None else functional.pad(mark, (0, lacking))[:, begin:end] for mark in (self.reset, valid)
        )
        return TokenBatch(functional.pad(self.tokens, (0, lacking))[:, begin : end + 1], *marks)


class NextTokens(DataModule):
    """Windows of text, or with ``segments`` consecutive segments, whose state is carried.

    Validation: windows as training has them, each of which begins a new sequence; with segments the state is carried.
    With ``reset_documents`` (as always with segments) every document begins a new sequence, too.
    """

    metrics = (BITS_PER_BYTE,)
    by_time = True

    def __init__(
        self, corpus: Corpus, settings: Settings, segments: bool = False, reset_documents: bool = False
    ) -> None:
        self.corpus, self.settings, self.carries = corpus, settings, segments
        place = (corpus.splits["train"], settings.batch_size, settings.length, settings.seed)
        self.sampler: SegmentStreams | RandomWindows | MixedWindows
        if segments:
            corpus.require_single("segments")
            self.sampler = SegmentStreams(*place)
        elif corpus.mixture is not None:
            self.sampler = MixedWindows(place[0], corpus.mixture, *place[1:], reset_documents=reset_documents)
        else:
            self.sampler = RandomWindows(*place, reset_documents=reset_documents)
        held_out = corpus.held_out(settings.validation_tokens)
        streams = max(1, min(settings.batch_size, (len(held_out) - 1) // settings.length))
        self.stream = EvaluationStream(held_out, settings.length, streams, reset_documents=segments or reset_documents)

    @property
    def validations(self) -> int:
        return len(self.stream)

    def batch(self, step: int, rank: int, world: int) -> TokenBatch:
        tokens = torch.from_numpy(self.sampler.batch(step, rank, world))
        return TokenBatch(tokens, _marks(self.sampler.resets(step, rank, world)))

    def validation(self, rank: int, world: int) -> Iterator[TokenBatch]:
        for segment in self.stream:
            tokens, valid = (torch.from_numpy(_share(item, rank, world)) for item in (segment.tokens, segment.valid))
            reset = None if segment.reset is None else _share(segment.reset, rank, world)
            yield TokenBatch(tokens, _marks(reset), None if valid.all() else valid)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_BYTE.name: bits_per_byte(means["nats"], self.corpus.splits[split])}

    def with_neighbours(self, train: np.ndarray, validation: np.ndarray) -> DataModule:
        return RetrievedTokens(self, train, validation)


class RetrievedBatch(NamedTuple):
    """A :class:`TokenBatch` and ``neighbours`` [batch, time, k] int64, the tokens that followed, -1 where is none."""

    tokens: Tensor
    reset: Tensor | None
    valid: Tensor | None
    neighbours: Tensor

    @property
    def size(self) -> int:
        """Return how many tokens are predicted."""
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)


class RetrievedTokens(DataModule):
    """The rows of ``texts`` with their neighbours.

    ``train`` and ``validation``, int32 [tokens, k]: row t belongs to the input at position t of the training split, and
    of the part of the validation split that is measured.
    """

    metrics = (BITS_PER_BYTE,)

    def __init__(self, texts: NextTokens, train: np.ndarray, validation: np.ndarray) -> None:
        self.texts, self.train, self.held_out, self.carries = texts, train, validation, texts.carries
        for table, split in ((train, texts.corpus.splits["train"]), (validation, texts.stream.split)):
            assert len(table) == len(split) - 1

    @property
    def validations(self) -> int:
        return self.texts.validations

    def batch(self, step: int, rank: int, world: int) -> RetrievedBatch:
        batch = self.texts.batch(step, rank, world)
        return _with_rows(batch, self.train, self.texts.sampler.starts(step), rank)

    def validation(self, rank: int, world: int) -> Iterator[RetrievedBatch]:
        stream = self.texts.stream
        for index, batch in enumerate(self.texts.validation(rank, world)):
            yield _with_rows(batch, self.held_out, stream.starts + index * stream.length, rank)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return self.texts.measured(means, split)


class NextTokenLoss:
    """Cross-entropy of each next token, in nats, over the valid tokens. ``by_token``: it is a mean over predictions,
    each of which needs its own logits alone."""

    by_token = True

    def __call__(self, model: CausalModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        tokens, targets, marks = batch.tokens[:, :-1], batch.tokens[:, 1:], {"valid": batch.valid, "reset": batch.reset}
        if cross_entropy.in_pieces(model, tokens.numel()):
            inputs, state = model.head_inputs(tokens, state, **marks)
            loss, nats = hidden_nats(model, inputs, targets, batch.valid)
        else:
            logits, state = model(tokens, state, **marks)
            loss, nats = next_token_nats(logits, targets, batch.valid)
        return loss, {"nats": nats, "predicted": predicted(batch)}, state


def predicted(batch: TokenBatch | RetrievedBatch) -> Tensor:
    """Return how many tokens of a batch are predicted and count."""
    return torch.full((), batch.size, device=batch.tokens.device) if batch.valid is None else batch.valid.sum()


def next_token_nats(logits: Tensor, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean and the detached sum of the cross-entropies of ``targets`` [batch, time], in float32, where
    ``valid``."""
    count: Tensor | int = max(1, targets.numel())
    if valid is not None:
        targets, count = targets.masked_fill(~valid, -100), valid.sum().clamp_min(1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return nats / count, nats.detach()


def hidden_nats(model: CausalModel, inputs: object, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what :func:`next_token_nats` does, from the head's ``inputs``; for hidden states without computing all
    logits at once."""
    if not isinstance(inputs, Tensor):
        return next_token_nats(model.logits(inputs), targets, valid)
    count: Tensor | int = max(1, targets.numel())
    if valid is not None:
        inputs, targets, count = inputs[valid], targets[valid], valid.sum().clamp_min(1)
    nats = cross_entropy.of_head(model, inputs.flatten(0, -2), targets.flatten())
    return nats / count, nats.detach()


def bits_per_byte(nats_per_token: float, split: Split) -> float:
    """Return nats per token as bits per byte of the text that the split's tokens stand for."""
    return nats_per_token / log(2) * len(split) / split.bytes


def _share(field: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Return a process's rows; rows that fill up the last share are zeros, and so not valid."""
    size = -(-len(field) // world)
    padded = np.zeros((size * world, *field.shape[1:]), field.dtype)
    padded[: len(field)] = field
    return padded[rank * size : (rank + 1) * size]


def _marks(reset: np.ndarray | None) -> Tensor | None:
    """Return where sequences begin, or None where none does, as in most batches, which saves work."""
    return None if reset is None or not reset.any() else torch.from_numpy(reset)


def _with_rows(batch: TokenBatch, table: np.ndarray, starts: np.ndarray, rank: int) -> RetrievedBatch:
    """Return ``batch`` with its rows of ``table``; ``starts`` are the positions of all processes' rows, the last of
    which may be fewer than the others'."""
    count, time = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    rows = np.full((count, time, table.shape[1]), -1, np.int64)
    for row, start in zip(rows, starts[rank * count : (rank + 1) * count].tolist(), strict=False):
        rows_of_table = table[start : start + time]
        row[: len(rows_of_table)] = rows_of_table
    return RetrievedBatch(*batch, torch.from_numpy(rows))


class RetrievedNextToken:
    """Cross-entropy of each next token where the head is given what followed the neighbours of every token (SPALM,
    Yogatama et al. 2021)."""

    reads_hidden = True

    def __call__(
        self, model: StackedCausalModel, batch: RetrievedBatch, state: State, progress: float
    ) -> ObjectiveOutput:
        hidden_states, state, _ = model.hidden(batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset)
        logits = model.head(hidden_states, model.input, neighbours=batch.neighbours)
        loss, nats = next_token_nats(logits, batch.tokens[:, 1:], batch.valid)
        return loss, {"nats": nats, "predicted": predicted(batch)}, state
