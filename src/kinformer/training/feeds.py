"""The rows of a task: those that a step learns from, those that validate, and how what they cost is told."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinformer.data import BosEos, Buckets, Corpus, EvaluationStream, Labelled, RandomWindows, SegmentStreams, Split
from kinformer.data.masked_text import MaskedText
from kinformer.data.masking import Masking
from kinformer.training.batch import Batch
from kinformer.training.settings import Settings

LEAST_EXAMPLES = 256


class Feed:
    """What a trainer asks of a task. ``unit``: what is predicted; ``judged``: whether right and wrong are counted."""

    unit: str = "label"
    judged: bool = True

    @property
    def validations(self) -> int:
        """Batches of a validation."""
        raise NotImplementedError

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """The rows of process ``rank`` of ``world``: a function of the step alone."""
        raise NotImplementedError

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        """The process's rows of a fixed part of the validation split, as many batches for all processes."""
        raise NotImplementedError

    def bits(self, nats: float, split: str) -> float:
        """Bits per unit, of nats per prediction in the split "train" or "validation"."""
        return nats / log(2)

    @property
    def figure(self) -> str:
        """What :meth:`bits` are called in records."""
        return f"bits_per_{self.unit.replace(' ', '_')}"


class NextTokens(Feed):
    """Windows of text, or with ``settings.segments`` consecutive segments, for a causal model.

    Validation: windows as training has them, each of which begins a new sequence; with segments the state is carried.
    """

    unit, judged = "byte", False

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.splits = corpus.splits
        self.sampler = (SegmentStreams if settings.segments else RandomWindows)(
            corpus.splits["train"], settings.batch_size, settings.length, settings.seed
        )
        kept = corpus.splits["validation"].take(settings.validation_tokens)
        streams = max(1, min(settings.batch_size, (len(kept) - 1) // settings.length))
        self.stream = EvaluationStream(kept, settings.length, streams, reset_documents=settings.segments)

    @property
    def validations(self) -> int:
        return len(self.stream)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        tokens = torch.from_numpy(self.sampler.batch(step, rank, world))
        return Batch(tokens, _marks(self.sampler.resets(step, rank, world)))

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        for segment in self.stream:
            tokens, reset, valid = (
                _share(field, rank, world) for field in (segment.tokens, segment.reset, segment.valid)
            )
            whole = valid is None or valid.all()
            yield Batch(torch.from_numpy(tokens), _marks(reset), None if whole else torch.from_numpy(valid))

    def bits(self, nats: float, split: str) -> float:
        return bits_per_byte(nats, self.splits[split])


class HiddenTokens(Feed):
    """Windows of text with tokens hidden, other ones at every step, and the same ones in every validation."""

    def __init__(self, corpus: Corpus, settings: Settings, masking: Masking, edges: BosEos) -> None:
        self.unit = "masked byte" if corpus.splits["train"].encoded_from is None else "masked token"
        train, kept = corpus.splits["train"], corpus.splits["validation"].take(settings.validation_tokens)
        self.text = MaskedText(train, settings.length, masking, edges, settings.seed)
        self.held_out = MaskedText(kept, settings.length, masking, edges, 0)
        self.sampler = self.text.sampler(settings.batch_size)
        self.batch_size = settings.batch_size

    @property
    def validations(self) -> int:
        return -(-len(self.held_out) // self.batch_size)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        return Batch.of(self.text.batch(self.sampler, step, rank, world))

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        for shown in self.held_out.in_order(self.batch_size):
            yield Batch.of(shown.rows.share(rank, world))


class Labels(Feed):
    """Examples with the classes to tell. Validation: the first ones of as many tokens as asked for, 256 at least."""

    def __init__(self, data: Labelled, settings: Settings, edges: BosEos) -> None:
        sizes = settings.batch_size, settings.length, settings.seed
        self.train, self.held_out = (Buckets(data.splits[name], *sizes, edges) for name in ("train", "validation"))
        enough = int(np.searchsorted(np.cumsum(self.held_out.lengths), settings.validation_tokens)) + 1
        self.examples = min(len(self.held_out.lengths), max(LEAST_EXAMPLES, enough))

    @property
    def validations(self) -> int:
        return -(-self.examples // self.held_out.batch_size)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        return Batch.of(self.train.batch(step, rank, world))

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        for rows in self.held_out.in_order(self.examples):
            yield Batch.of(rows.share(rank, world))


def bits_per_byte(nats_per_token: float, split: Split) -> float:
    """Nats per token as bits per byte of the text that the split's tokens stand for."""
    return nats_per_token / log(2) * len(split) / split.bytes


def _share(field: np.ndarray | None, rank: int, world: int) -> Any:
    """A process's rows; rows that fill up the last share are invalid."""
    if field is None:
        return None
    size = -(-len(field) // world)
    padded = np.zeros((size * world, *field.shape[1:]), field.dtype)
    padded[: len(field)] = field
    return padded[rank * size : (rank + 1) * size]


def _marks(reset: np.ndarray | None) -> Tensor | None:
    """Where sequences begin, or None where none does, so that nobody works for it; most batches have none."""
    return None if reset is None or not reset.any() else torch.from_numpy(reset)
