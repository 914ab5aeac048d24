"""Rows of pairs for an encoder-decoder, in batches of this many tokens, and the objective of translating them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import lcm, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.data import IGNORED, BosEos
from kinformer.data.pairs import Pairs, Parallel
from kinformer.data.token_batches import TokenBatches
from kinformer.data.tokenizer import Tokenizer
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import note_once
from kinformer.runtime.words import plural
from kinformer.training.batch import stretch_of_rows
from kinformer.training.data_module import DataModule
from kinformer.training.metric import ACCURACY, BITS_PER_BYTE
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings

ENCODED_AT_ONCE = 1 << 12


class PairBatch(NamedTuple):
    """``source`` int64 [rows, length], with EOS; ``target`` int64 [rows, time], BOS and the translation; ``labels``
    [rows, time], the translation and EOS, IGNORED elsewhere; which of either are ``valid``; the ``bytes`` int64 [rows]
    of the translations."""

    source: Tensor
    source_valid: Tensor
    target: Tensor
    target_valid: Tensor
    labels: Tensor
    bytes: Tensor

    @property
    def size(self) -> int:
        """Return how many tokens are read, padding included."""
        return self.source.numel() + self.target.numel()

    def stretch(self, number: int, count: int) -> PairBatch:
        """Return stretch ``number`` of ``count`` of the time of sources and of targets; bytes count in the first."""
        source, source_valid = stretch_of_rows(self.source, self.source_valid, number, count)
        target, target_valid = stretch_of_rows(self.target, self.target_valid, number, count)
        labels, _ = stretch_of_rows(self.labels, None, number, count)
        assert source_valid is not None and target_valid is not None
        labels = labels.masked_fill(~target_valid, IGNORED)
        return PairBatch(source, source_valid, target, target_valid, labels, self.bytes * (number == 0))


class EncodedPairs:
    """Pairs as ids: text i of a side is ``ids[side][starts[side][i] : starts[side][i + 1]]``."""

    def __init__(self, pairs: Pairs, tokenizer: Tokenizer) -> None:
        self.sides = [_encoded(side, tokenizer) for side in pairs]
        self.bytes = np.array([len(line) for line in pairs.target], np.int64)

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def widths(self) -> np.ndarray:
        """Return the tokens of the longer side, with the one that ends it, int64 [pairs]."""
        return 1 + np.max([np.diff(starts) for _, starts in self.sides], axis=0)

    def batch(self, indices: np.ndarray, ends: BosEos) -> PairBatch:
        """Make a padded batch of the pairs ``indices`` [rows], one or more."""
        assert ends.bos is not None and ends.eos is not None
        source, target = ([ids[starts[i] : starts[i + 1]] for i in indices] for ids, starts in self.sides)
        sources, source_valid = padded([[*ids, ends.eos] for ids in source])
        read, valid = padded([[ends.bos, *ids] for ids in target])
        labels, _ = padded([[*ids, ends.eos] for ids in target])
        bytes = torch.from_numpy(self.bytes[indices])
        return PairBatch(sources, source_valid, read, valid, labels.masked_fill(~valid, IGNORED), bytes)


def _encoded(lines: Sequence[bytes], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    parts, starts = [], [np.zeros(1, np.int64)]
    for first in range(0, len(lines), ENCODED_AT_ONCE):
        some = tokenizer.encode_batch(lines[first : first + ENCODED_AT_ONCE])
        parts.append(np.concatenate(some).astype(np.int32))
        starts.append(starts[-1][-1] + np.cumsum([len(ids) for ids in some]))
    return np.concatenate(parts), np.concatenate(starts)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ids int64 [rows, longest], zero behind each row's end, and which of them are real."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for local, row in zip(tokens, rows, strict=True):
        local[: len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]


class TranslationPairs(DataModule):
    """Batches of at most ``batch_size`` x ``length`` tokens of the longer side; pairs longer than ``length`` are left
    out. Validation: the first pairs, of as many tokens as the settings say."""

    sums = ("nats", "correct", "bytes")
    by_time = True
    metrics = (BITS_PER_BYTE, ACCURACY)

    def __init__(self, data: Parallel, settings: Settings, ends: BosEos, smoothing: float) -> None:
        self.settings, self.ends, self.smoothing = settings, ends, smoothing
        self.train, self.held_out = (
            EncodedPairs(data.splits[name], data.tokenizer) for name in ("train", "validation")
        )
        widths = self.train.widths
        self.fitting = np.flatnonzero(widths <= settings.length)
        if not len(self.fitting):
            raise KinformerError(
                f"`length` {settings.length}: no pair of {data.name} is so short, the shortest has {widths.min()} "
                "tokens with its end; give more."
            )
        if left := len(widths) - len(self.fitting):
            note_once(
                f"note: {left:,} of {plural(len(widths), 'pair')} are longer than `length` {settings.length} and are "
                "left out."
            )
        self.tokens = settings.batch_size * settings.length
        self._batches: dict[int, TokenBatches] = {}
        indices = np.flatnonzero(self.held_out.widths <= settings.length)
        indices = indices if len(indices) else np.arange(len(self.held_out))
        enough = int(np.searchsorted(np.cumsum(self.held_out.widths[indices]), settings.validation_tokens)) + 1
        self.measured_pairs = indices[:enough]
        self.validating = TokenBatches(self.held_out.widths[self.measured_pairs], self.tokens, 0)

    @property
    def validations(self) -> int:
        return self.validating.batches

    def batch(self, step: int, rank: int, world: int) -> PairBatch:
        if world not in self._batches:
            # The same batches for 1, 2, 4 and 8 processes, which share their rows evenly.
            rows = lcm(1 << min(3, self.settings.batch_size.bit_length() - 1), world * self.settings.accumulate)
            self._batches[world] = TokenBatches(self.train.widths[self.fitting], self.tokens, self.settings.seed, rows)
        return self.train.batch(self.fitting[self._batches[world].indices(step)[rank::world]], self.ends)

    def validation(self, rank: int, world: int) -> Iterator[PairBatch]:
        for step in range(self.validations):
            indices = self.measured_pairs[self.validating.indices(step)]
            indices_here = indices[rank::world]
            batch = self.held_out.batch(indices_here if len(indices_here) else indices[:1], self.ends)
            if not len(indices_here):  # fewer pairs than processes: this one's does not count
                batch = batch._replace(labels=torch.full_like(batch.labels, IGNORED), bytes=batch.bytes * 0)
            yield batch

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_BYTE.name: means["nats"] / log(2) / means["bytes"], ACCURACY.name: means["correct"]}


class TranslationLoss:
    """Mean cross-entropy of the targets' tokens, each predicted from the source and the right ones before it; in
    training ``smoothing`` of the probability is spread over all ids (Szegedy et al. 2016)."""

    reads_hidden = True
    by_token = True

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, model: Any, batch: PairBatch, state: State, progress: float) -> ObjectiveOutput:
        state = model.begin(batch.source, batch.source_valid)
        inputs, state = model.head_inputs(batch.target, state, valid=batch.target_valid)
        counted = batch.labels != IGNORED
        logits = model.logits(states.map_tensors(lambda item: item[counted][None], inputs))[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = batch.labels[counted]
        nats = functional.cross_entropy(logits, labels, reduction="sum")
        loss = nats / max(1, len(labels))
        if model.training and self.smoothing and len(labels):
            loss = functional.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        metrics = {
            "nats": nats.detach(),
            "predicted": counted.sum(),
            "correct": (logits.detach().argmax(-1) == labels).sum(),
            "bytes": batch.bytes.sum(),
        }
        return loss, metrics, state
