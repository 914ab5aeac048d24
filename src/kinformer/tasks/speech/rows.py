"""Rows of sound and their transcripts, and the objective of connectionist temporal classification.

    loss = -log sum over the paths that give the transcript of prod over positions of p(class of the path)

Graves et al. 2006. A position is some frames of 10 ms, as the model's input takes them; a transcript with n symbols, r
of which repeat the one before, needs n + r positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from kinformer.core.model import CausalModel, WholeModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.state import State
from kinformer.data.buckets import STEP_OF_WIDTH, Order
from kinformer.data.filterbank import Filterbank, normalised_features, windows
from kinformer.data.permutation import mix
from kinformer.data.sound import Sound, split_symbols
from kinformer.evaluation.transcripts import count_errors
from kinformer.generation.ctc import BLANK, greedy
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.tasks.shared.views import FrameInput, input_of
from kinformer.tasks.speech.augment import masked, with_speed
from kinformer.tasks.task import TrainingPlan
from kinformer.training.data_module import DataModule
from kinformer.training.metric import BITS_PER_SYMBOL, ERROR_RATE
from kinformer.training.objective import ObjectiveOutput

LEAST_EXAMPLES = 64
IGNORED = -1
_CHANGES = 6


class SpeechBatch(NamedTuple):
    """``frames`` [batch, time, width, mels] float32, ``valid`` [batch, time] bool; ``targets`` [batch, n] int64, of
    which a row has its ``counts`` [batch] first ones; a row with IGNORED as its count is no example."""

    frames: Tensor
    valid: Tensor
    targets: Tensor
    counts: Tensor

    @property
    def size(self) -> int:
        """Return how many positions there are, padding included."""
        return self.valid.numel()


class Rows:
    """The utterances of a split as a model of ``config`` hears them.

    ``usable`` are those that training can learn from: not longer than ``length`` positions, and long enough for their
    transcripts. ``changes``: the names of what changes an utterance at random, where it has a generator.
    """

    def __init__(
        self, data: Sound, split: str, config: ModelConfig, length: int | None = None, changes: Sequence[str] = ()
    ) -> None:
        self.changes = changes
        self.data, self.utterances, self.config = data, data.splits[split], config
        self.input: FrameInput = input_of(config)
        self.bank = Filterbank(data.rate, self.input.mels)
        number = {symbol: index for index, symbol in enumerate(data.symbols, start=1)}
        count = len(self.utterances.lengths)
        transcripts = (split_symbols(self.utterances.transcript(index), data.unit) for index in range(count))
        self.targets = [np.array([number[symbol] for symbol in transcript], np.int64) for transcript in transcripts]
        frames = 1 + np.maximum(0, self.utterances.lengths - self.bank.size) // self.bank.hop
        self.positions = -(-frames // self.input.stride)
        needed = np.array([len(target) + int((target[1:] == target[:-1]).sum()) for target in self.targets])
        self.needed = needed
        self.short, self.long = self.positions < needed, self.positions > (length or np.inf)
        self.usable = np.flatnonzero(~(self.short | self.long))
        self.length = length

    def tell_left_out(self, split: str) -> None:
        """Note how many utterances cannot be learnt from; refuse a split of which none can."""
        for left in (self.long, self.short):
            if not left.any():
                continue
            words = self.left_out(split, left)
            if not len(self.usable):
                raise KinformerError(f"{words}, and none is left; give a larger `length` or other data.")
            note(f"note: {words} and are left out.")

    def left_out(self, split: str, left: np.ndarray) -> str:
        """Return in words how many utterances are too long, or too short for their transcripts, as ``left`` says."""
        seconds = self.input.stride * self.bank.hop / self.data.rate
        why = f"shorter than their transcripts at {1000 * seconds:.0f} ms a position"
        if left is self.long:
            why = f"longer than `length` {self.length} positions of {1000 * seconds:.0f} ms"
        count = f"{int(left.sum()):,} of {plural(len(left), 'utterance')}"
        first = self.utterances.name(int(np.flatnonzero(left)[0]))
        return f"{self.data.name}: {count} of the {split} split (as {first}) are {why}"

    def batch(
        self, numbers: np.ndarray, counted: np.ndarray | None = None, generators: Sequence[Generator] = ()
    ) -> SpeechBatch:
        """Return utterances by number; those that are not ``counted`` [batch] bool are no examples. With
        ``generators``, one an utterance, they are changed at random."""
        drawn: Sequence[Generator | None] = generators or [None] * len(numbers)
        rows = [self.features(number, generator) for number, generator in zip(numbers.tolist(), drawn, strict=True)]
        targets = [self.targets[number] for number in numbers.tolist()]
        time = max(map(len, rows))
        time = -(-time // STEP_OF_WIDTH) * STEP_OF_WIDTH if time > STEP_OF_WIDTH else time
        frames = torch.zeros(len(rows), time, *rows[0].shape[1:])
        symbols = np.full((len(rows), max(map(len, targets))), BLANK, np.int64)
        for row, utterance, symbol, target in zip(frames, rows, symbols, targets, strict=True):
            row[: len(utterance)] = utterance
            symbol[: len(target)] = target
        counts = np.array([len(target) for target in targets])
        counts = counts if counted is None else np.where(counted, counts, IGNORED)
        valid = torch.arange(time) < torch.tensor([len(local) for local in rows])[:, None]
        return SpeechBatch(frames, valid, torch.from_numpy(symbols), torch.from_numpy(counts))

    def features(self, number: int, generator: Generator | None = None) -> Tensor:
        """Return an utterance as positions [time, width, mels], changed at random by a ``generator``; for a causal
        model normalised by what was heard so far."""
        samples = self.utterances.samples(number)
        if generator is None:
            return features_of(samples, self.bank, self.config)
        if "speed" in self.changes:
            changed = with_speed(samples, generator)
            positions = -(-self.bank.frames(len(changed)) // self.input.stride)
            samples = changed if self.needed[number] <= positions <= (self.length or positions) else samples
        masks = "specaugment" in self.changes
        return features_of(samples, self.bank, self.config, partial(masked, generator=generator) if masks else None)


def features_of(
    samples: Tensor, bank: Filterbank, config: ModelConfig, change: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return sound, float32 [time], as positions [positions, width, mels] of a model of ``config``, after a ``change``
    of its normalised features [frames, mels]; for a causal one these are normalised by what was heard so far."""
    features = normalised_features(samples, bank, config.protocol is CausalModel)
    input: FrameInput = input_of(config)
    return windows(features if change is None else change(features), input.width, input.stride)


class SpeechRows(DataModule):
    """Utterances of like length side by side. Validation: the first ones of as many positions as the settings say, 64
    at least."""

    sums = ("nats", "errors")
    metrics = (ERROR_RATE, BITS_PER_SYMBOL)

    def __init__(self, plan: TrainingPlan) -> None:
        settings, changes = plan.settings, plan.options.changes
        self.train = Rows(plan.data, "train", plan.config, settings.length, changes)
        self.held_out = Rows(plan.data, "validation", plan.config, settings.length)
        self.seed, self.size = settings.seed, settings.batch_size
        self.order = Order(self.train.positions[self.train.usable], self.size, settings.seed)
        positions = self.held_out.positions[self.held_out.usable]
        enough = int(np.searchsorted(np.cumsum(positions), settings.validation_tokens)) + 1
        self.batches = list(Order(positions, self.size, 0).batches(min(len(positions), max(LEAST_EXAMPLES, enough))))

    @property
    def validations(self) -> int:
        return len(self.batches)

    def batch(self, step: int, rank: int, world: int) -> SpeechBatch:
        numbers = self.train.usable[self.order.indices(step)]
        share = len(numbers) // world
        places = range(rank * share, (rank + 1) * share)
        generators = self._generators(step, places) if self.train.changes else ()
        return self.train.batch(numbers[places.start : places.stop], generators=generators)

    def _generators(self, step: int, places: range) -> list[Generator]:
        """Return a generator for each of the rows at ``places`` of a step, the same in any number of processes."""
        seeds = mix(self.seed, _CHANGES, step, np.arange(places.start, places.stop)) >> np.uint64(1)
        return [Generator().manual_seed(seed) for seed in seeds.tolist()]

    def validation(self, rank: int, world: int) -> Iterator[SpeechBatch]:
        for indices in self.batches:
            share = -(-len(indices) // world)
            places = np.arange(rank * share, (rank + 1) * share)
            numbers = self.held_out.usable[indices[np.minimum(places, len(indices) - 1)]]
            yield self.held_out.batch(numbers, places < len(indices))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ERROR_RATE.name: means["errors"], BITS_PER_SYMBOL.name: means["nats"] / log(2)}


class CTC:
    """The mean over symbols of the negative log-likelihood of transcripts; ``errors`` are those of the greedy path."""

    def __call__(
        self, model: CausalModel | WholeModel, batch: SpeechBatch, state: State, progress: float
    ) -> ObjectiveOutput:
        outputs = model(batch.frames, valid=batch.valid)
        logits, state = (outputs, None) if isinstance(outputs, Tensor) else outputs
        lengths, there = batch.valid.sum(1), batch.counts != IGNORED
        nats = ctc_nats(logits, lengths, batch.targets, batch.counts.clamp_min(0)).where(there, 0).sum()
        symbols = batch.counts.clamp_min(0).sum()
        hypotheses, heard = transcripts(logits.detach(), lengths, batch)
        errors = torch.full_like(symbols, count_errors(hypotheses, heard).edits)
        return nats / symbols.clamp_min(1), {"nats": nats.detach(), "predicted": symbols, "errors": errors}, state


def ctc_nats(logits: Tensor, lengths: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Return -log p(transcript) [batch] of ``logits`` [batch, time, classes], of whose positions a row has ``lengths``
    [batch], and ``targets`` [batch, n], of which it has ``counts`` [batch]; 0 where positions are too few for them."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(precise, targets, lengths, counts, blank=BLANK, reduction="none", zero_infinity=True)


def transcripts(logits: Tensor, lengths: Tensor, batch: SpeechBatch) -> tuple[list[list[int]], list[list[int]]]:
    """Return the right and the greedy transcripts of every example, as classes."""
    transcripts_, heard = [], []
    counts = batch.counts.tolist()
    paths = logits.float().cpu()
    for row, length, target, count in zip(paths, lengths.tolist(), batch.targets.tolist(), counts, strict=True):
        if count != IGNORED:
            transcripts_.append(target[:count])
            heard.append(greedy(row[:length]))
    return transcripts_, heard
