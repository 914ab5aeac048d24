"""The task of speech: its rows, its objective, decoding, and errors of transcripts.

A training row is an utterance and its transcript, which are not aligned; "_" is the blank:

    frames    f1 f2 f3 f4 f5 f6  0  0     positions of ``width`` frames each; zeros are padding
    valid     1  1  1  1  1  1   0  0
    targets   c a t                       numbers of symbols from 1; ``counts`` is 3
    paths     c a a _ t t, _ c a t _ _    the loss sums over all paths that give "cat"
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, inf, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from kinformer.core.model import CausalModel, StackedCausalModel, StackedWholeModel, WholeModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State, nbytes
from kinformer.generation.beam import BLANK, Fusion, Greedy, SymbolModel, Texts, greedy, prefix_beam
from kinformer.inputs.signals import (
    CHARACTERS,
    HOP,
    Filterbank,
    Frames,
    RunningNorm,
    normalised,
    normalised_features,
    windows,
)
from kinformer.lab.data.buckets import STEP_OF_WIDTH, Order
from kinformer.lab.data.files import readable, reading_corpus
from kinformer.lab.data.labelled import STDIN
from kinformer.lab.data.sampling import mix
from kinformer.lab.data.sound import (
    ENDINGS,
    Resampler,
    Sound,
    WavStream,
    folded,
    join_symbols,
    open_sound,
    read_sound,
    resample,
    sound_info,
    split_symbols,
)
from kinformer.lab.evaluation.transcripts import Errors, count_errors, jiwer
from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    Evaluation,
    EvaluationSettings,
    FileSource,
    LoadedRun,
    Made,
    Predicted,
    PredictionSettings,
    TextTable,
    TrainedRun,
    Write,
    input_of,
    part_of,
    track,
)
from kinformer.lab.tasks.options import (
    DecodingOptions,
    SpeechEvaluationOptions,
    SpeechOptions,
    SpeechPredictionOptions,
)
from kinformer.lab.tasks.task import GenerationSettings, Source, TrainingPlan
from kinformer.lab.tasks.texts import HeldOut, check_sequence, pooled, spec_of, tokenizer_of
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput
from kinformer.lab.training.logging import BITS_PER_SYMBOL, ERROR_RATE
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.progress import note, note_once

# The data, and how a model is fitted to it.

INPUT, HEAD = "frames", "ctc"


def open_clips(source: Source, options: SpeechOptions, cache: Path | None = None) -> Sound:
    """Return the clips that ``source`` names."""
    if source.spec == "stdlib":
        raise KinformerError("`data` stdlib: is text, not speech; give a folder of clips, or leave it out.")
    return open_sound(source.spec, options.reading(source.holdout))


def fit(config: ModelConfig, data: Sound | None) -> dict[str, object]:
    """Return the overrides: an input of frames, and a head for the symbols of the data and the blank."""
    classes = 2 if data is None else 1 + len(data.symbols)
    head: dict[str, object] = {"head": {"kind": HEAD, "classes": classes}}
    if config.head.kind == HEAD:
        head = {"head.classes": classes}
    return head if config.input.kind == INPUT else {"input": {"kind": INPUT}} | head


def row_lengths(data: Sound, config: ModelConfig) -> np.ndarray:
    """Return the positions of each training utterance."""
    return Rows(data, "train", config).positions


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model of other symbols, and splits without an utterance to learn from."""
    jiwer()
    check_sequence(model)
    classes: int = part_of(plan.config.head, "classes")
    input: Frames.Config = input_of(plan.config)
    if classes != 1 + len(plan.data.symbols):
        raise KinformerError(
            f"`set` head.classes={classes}: the data has {plural(len(plan.data.symbols), 'symbol')}, and one "
            "class more is the blank; leave it out."
        )
    Filterbank(plan.data.rate, input.mels)
    for split in ("train", "validation"):
        Rows(plan.data, split, plan.config, plan.settings.length).tell_left_out(split)


# Training utterances changed at random: their speed, and masks over their spectrograms.
#
# Everything random comes from a generator of the utterance in its step, so that it follows from the run's seed.
#
# ``speed``        played 0.9, 1 or 1.1 times as fast, pitch included (Ko et al. 2015, Audio Augmentation)
# ``specaugment``  two bands of filters and two stretches of time become 0, which is the mean of normalised features
#                  (Park et al. 2019, SpecAugment, arXiv 1904.08779, section 2: their policies without the time warp). A
#                  band has up to 27 / 80 of the filters, a stretch up to a second and a fifth of the utterance.

SPEEDS = (90, 100, 110)
"""Speeds in per cent."""
MASKS = 2
BAND, SECONDS, SHARE = 27 / 80, 1.0, 0.2


def with_speed(samples: Tensor, generator: Generator) -> Tensor:
    """Return ``samples`` float32 [time] at a random speed: 100 samples at one rate are ``speed`` at another."""
    speed = SPEEDS[int(torch.randint(len(SPEEDS), (), generator=generator))]
    return samples if speed == 100 else resample(samples, speed, 100)


def masked(features: Tensor, generator: Generator) -> Tensor:
    """Return normalised features [frames, mels] with bands and stretches of 0."""
    features = features.clone()
    frames, mels = features.shape
    for _ in range(MASKS):
        begin, end = _stretch(mels, int(BAND * mels), generator)
        features[:, begin:end] = 0
        begin, end = _stretch(frames, int(min(SECONDS / HOP, SHARE * frames)), generator)
        features[begin:end] = 0
    return features


def _stretch(size: int, longest: int, generator: Generator) -> tuple[int, int]:
    """Return where a stretch of 0 to ``longest`` of this many places begins and ends; each length is as probable."""
    length = int(torch.randint(longest + 1, (), generator=generator))
    begin = int(torch.randint(size - length + 1, (), generator=generator))
    return begin, begin + length


# Rows of sound and their transcripts, and the objective of connectionist temporal classification.
#
#     loss = -log sum over the paths that give the transcript of prod over positions of p(class of the path)
#
# Graves et al. 2006. A position is some frames of 10 ms, as the model's input takes them. A transcript of n symbols
# with r immediate repetitions needs n + r positions, because a blank must separate equal symbols.

LEAST_EXAMPLES = 64
IGNORED = -1
_CHANGES = 6


class SpeechBatch(NamedTuple):
    """``frames`` [batch, time, width, mels] float32, ``valid`` [batch, time] bool; ``targets`` [batch, n] int64; the
    first ``counts`` [batch] targets of each row are real. A row with the count IGNORED does not count."""

    frames: Tensor
    valid: Tensor
    targets: Tensor
    counts: Tensor

    @property
    def size(self) -> int:
        return self.valid.numel()


class Rows:
    """The utterances of a split as a model of ``config`` hears them.
    ``usable`` are the utterances that training can learn from: not longer than ``length`` positions, and long enough
    for their transcripts. ``changes`` names the random changes of an utterance, which are made where it has a
    generator."""

    def __init__(
        self, data: Sound, split: str, config: ModelConfig, length: int | None = None, changes: Sequence[str] = ()
    ) -> None:
        self.changes = changes
        self.data, self.utterances, self.config = data, data.splits[split], config
        self.input: Frames.Config = input_of(config)
        self.bank = Filterbank(data.rate, self.input.mels)
        number = {symbol: index for index, symbol in enumerate(data.symbols, start=1)}
        texts = map(self.utterances.transcript, range(len(self.utterances.lengths)))
        self.transcripts = [split_symbols(text, data.unit) for text in texts]
        self.targets = [np.array([number[symbol] for symbol in row], np.int64) for row in self.transcripts]
        frames = 1 + np.maximum(0, self.utterances.lengths - self.bank.size) // self.bank.hop
        self.positions = -(-frames // self.input.stride)
        self.needed = np.array([len(target) + int((target[1:] == target[:-1]).sum()) for target in self.targets])
        self.short, self.long = self.positions < self.needed, self.positions > (length or np.inf)
        self.usable = np.flatnonzero(~(self.short | self.long))
        self.length = length

    def tell_left_out(self, split: str) -> None:
        """Note how many utterances cannot be learnt from; refuse a split without any other."""
        for words in [self.left_out(split, left) for left in (self.long, self.short) if left.any()]:
            if not len(self.usable):
                raise KinformerError(f"{words}, and none is left; give a larger `length` or other data.")
            note_once(f"note: {words} and are left out.")

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
        """Return a batch of utterances by number; utterances outside ``counted`` [batch] bool do not count. With
        ``generators``, one an utterance, they are changed at random."""
        drawn: Sequence[Generator | None] = generators or [None] * len(numbers)
        rows = [self.features(number, generator) for number, generator in zip(numbers.tolist(), drawn, strict=True)]
        targets = [torch.from_numpy(self.targets[number]) for number in numbers.tolist()]
        longest = max(map(len, rows))
        time = -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH if longest > STEP_OF_WIDTH else longest
        frames = functional.pad(pad_sequence(rows, batch_first=True), (0, 0, 0, 0, 0, time - longest))
        symbols = pad_sequence(targets, batch_first=True, padding_value=BLANK)
        counts = torch.tensor([len(target) for target in targets])
        counts = counts if counted is None else counts.where(torch.from_numpy(counted), IGNORED)
        return SpeechBatch(frames, torch.arange(time) < torch.tensor(list(map(len, rows)))[:, None], symbols, counts)

    def features(self, number: int, generator: Generator | None = None) -> Tensor:
        """Return an utterance as positions [time, width, mels], changed at random by a ``generator``, if any."""
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
    of its normalised features [frames, mels]; for a causal model the features are normalised by the sound so far."""
    features = normalised_features(samples, bank, config.protocol is CausalModel)
    input: Frames.Config = input_of(config)
    return windows(features if change is None else change(features), input.width, input.stride)


class SpeechRows(DataModule):
    """Utterances of like length side by side; validation has the first ones, 64 at least."""

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
        places = np.arange(rank * share, (rank + 1) * share)
        # A seed for each row of the step, the same in any number of processes.
        seeds = (mix(self.seed, _CHANGES, step, places) >> np.uint64(1)).tolist() if self.train.changes else ()
        return self.train.batch(numbers[places], generators=[Generator().manual_seed(seed) for seed in seeds])

    def validation(self, rank: int, world: int) -> Iterator[SpeechBatch]:
        for indices in self.batches:
            share = -(-len(indices) // world)
            places = np.arange(rank * share, (rank + 1) * share)
            numbers = self.held_out.usable[indices[np.minimum(places, len(indices) - 1)]]
            yield self.held_out.batch(numbers, places < len(indices))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ERROR_RATE.name: means["errors"], BITS_PER_SYMBOL.name: means["nats"] / log(2)}

    def baselines(self) -> dict[str, float]:
        rows = self.held_out
        numbers = rows.usable[np.concatenate(self.batches)].tolist()
        return _simple_rules(rows.data, [rows.transcripts[number] for number in numbers])


class CTC:
    """The mean over symbols of the negative log-likelihood of transcripts; ``errors`` count the greedy path's."""

    def __call__(
        self, model: CausalModel | WholeModel, batch: SpeechBatch, state: State, progress: float
    ) -> ObjectiveOutput:
        outputs = model(batch.frames, valid=batch.valid)
        logits, state = (outputs, None) if isinstance(outputs, Tensor) else outputs
        lengths, there = batch.valid.sum(1), batch.counts != IGNORED
        nats = ctc_nats(logits, lengths, batch.targets, batch.counts.clamp_min(0)).where(there, 0).sum()
        symbols = batch.counts.clamp_min(0).sum()
        columns = logits.detach().float().cpu(), lengths.tolist(), batch.targets.tolist(), batch.counts.tolist()
        rows = [row for row in zip(*columns, strict=True) if row[-1] != IGNORED]
        heard = [greedy(path[:length]) for path, length, _, _ in rows]
        errors = torch.full_like(symbols, count_errors([target[:count] for _, _, target, count in rows], heard).edits)
        return nats / symbols.clamp_min(1), {"nats": nats.detach(), "predicted": symbols, "errors": errors}, state


def ctc_nats(logits: Tensor, lengths: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Return -log p(transcript) [batch] of ``logits`` [batch, time, classes] with ``lengths`` [batch] positions, and
    ``targets`` [batch, n] with ``counts`` [batch] symbols; 0 where a row has too few positions."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).transpose(0, 1)
    # zero_infinity: a row with too few positions lacks a path, and its infinite loss would spoil the batch's gradient.
    return functional.ctc_loss(precise, targets, lengths, counts, blank=BLANK, reduction="none", zero_infinity=True)


# From logits to transcripts: by the most probable path, by a beam, or by a beam with a language model.


def decoder_of(
    subject: LoadedRun, symbols: Sequence[str], unit: str, prefixes: int, options: DecodingOptions
) -> Callable[[Tensor], list[int]]:
    """Return a function from logits [time, classes] to symbols, by number from 1; ``symbols`` are texts of ``unit``."""
    if prefixes == 1:
        return greedy
    beside = subject.language_model
    if beside is None:
        return lambda logits: prefix_beam(logits, prefixes)
    texts = _texts(beside, symbols, "" if unit == CHARACTERS else " ")
    fusion = Fusion(SymbolModel(beside.model, texts), options.alpha, options.beta)
    return lambda logits: prefix_beam(logits, prefixes, fusion)


def _texts(beside: LoadedRun, symbols: Sequence[str], between: str) -> Texts:
    """Return the tokens of the language model for symbols: a transcript is a line."""
    tokenizer = tokenizer_of(beside.run)

    def tokens(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text)]

    later = [tokens(between + symbol) for symbol in symbols]
    texts = Texts([tokens(symbol) for symbol in symbols], later, tokens("\n"), tokens("\n"))
    joined = tokens("\n" + "".join(between + symbol for symbol in symbols) + "\n")
    if joined != [*texts.begin, *(token for item in later for token in item), *texts.end]:
        raise KinformerError(
            f"`language_model` {beside.run.folder}: its tokenizer joins neighbouring symbols into one token; "
            "give a run that was trained on bytes."
        )
    return texts


# How well a model transcribes speech, beside writing nothing and writing the most frequent transcript.

SHOWN = 8


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: SpeechEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on all held-out utterances, however long or short."""
    model, prefixes = subject.model, options.prefixes
    data = _data(subject, settings)
    held = HeldOut.of(subject.run, settings, data)
    rows = Rows(data, held.name, model.config)
    decode = decoder_of(subject, data.symbols, data.unit, prefixes, options)
    started_at = time.perf_counter()
    heard_symbols: list[list[str]] = [[] for _ in rows.positions]
    nats, device = 0.0, device_of(model)
    with torch.inference_mode():
        for numbers in track(_by_length(rows.positions, settings.chunk), len(rows.positions), quiet, size=len):
            batch = rows.batch(numbers)
            outputs = model(batch.frames.to(device), valid=batch.valid.to(device))
            logits = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).float().cpu()
            lengths = batch.valid.sum(1)
            nats += float(ctc_nats(logits, lengths, batch.targets, batch.counts).double().sum())  # 0 of short ones
            require_finite(isfinite(nats))
            for number, row, length in zip(numbers.tolist(), logits, lengths.tolist(), strict=True):
                heard_symbols[number] = [data.symbols[symbol - 1] for symbol in decode(row[:length])]
    if rows.short.any():
        note(f"note: {rows.left_out(settings.split, rows.short)} and are left out of the bits per symbol.")
    fold: Callable[[list[str]], list[str]] = list if options.fold is None else partial(_folded, unit=data.unit)
    references, heard_symbols = (list(map(fold, some)) for some in (rows.transcripts, heard_symbols))
    table = _table(rows, references, heard_symbols)
    options.write_predictions(table)
    errors = count_errors(references, heard_symbols)
    worst = sorted((row for row in table if row["errors"]), key=lambda row: -row["errors"])[:SHOWN]
    possible = int(sum(len(rows.targets[number]) for number in rows.usable))
    bits = nats / log(2) / possible if possible else inf  # no path of so few positions gives a transcript
    metrics = {ERROR_RATE: errors.rate, BITS_PER_SYMBOL: bits}
    baselines = _simple_rules(data, references, fold)
    right = sum(a == b for a, b in zip(references, heard_symbols, strict=True))
    facts: dict[str, object] = errors._asdict() | {"utterances": len(references), "right": right, "prefixes": prefixes}
    facts |= {"baselines": baselines, "unit": data.unit, "fold": options.fold}
    facts |= {name: getattr(options, name) for name in ("language_model", "alpha", "beta") if options.name}
    text: list[str | TextTable] = [
        _metrics(data.unit, errors, bits, options),
        f"{right:,} of {plural(len(references), 'utterance')} without an error; writing nothing has an error rate of "
        f"100 %, always the most frequent transcript {baselines['most_frequent']:.1%}\n",
        TextTable(("utterance", "said", "heard"), [[row["audio"], row["label"], row["text"]] for row in worst]),
    ]
    if data.unit == CHARACTERS:
        words = count_errors(*(["".join(item).split() for item in some] for some in (references, heard_symbols)))
        facts["word_error_rate"] = words.rate
        text.insert(1, f"word error rate {words.rate:.2%} of {plural(words.symbols, 'word')}\n")
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="speech", since=started_at)


def _by_length(positions: np.ndarray, chunk: int) -> Iterator[np.ndarray]:
    """Yield the numbers of utterances of these ``positions``, the short ones first, some ``chunk`` positions a time."""
    order = np.argsort(positions, kind="stable")
    while len(order):
        count = max(1, chunk // int(positions[order[0]]))
        yield order[:count]
        order = order[count:]


def _simple_rules(
    data: Sound, references: list[list[str]], fold: Callable[[list[str]], list[str]] = list
) -> dict[str, float]:
    """Return the error rates of writing nothing, and of always writing the most frequent transcript of training."""
    train = data.splits["train"]
    counts = Counter(train.transcript(number) for number in range(len(train.lengths)))
    frequent = fold(split_symbols(counts.most_common(1)[0][0], data.unit))
    return {"empty": 1.0, "most_frequent": count_errors(references, [frequent] * len(references)).rate}


def _data(subject: LoadedRun, settings: EvaluationSettings) -> Sound:
    """Return the data to measure on, with the symbols and the rate of the run's."""
    run = subject.run
    symbols, _, rate = writing_of(run)
    spec = spec_of(run, settings.data)
    options = run.options.reading(run.data.get("holdout"))
    options = replace(options, rate=None if spec == "dtmf" else rate, units=run.data["identity"].get("unit"))
    if settings.data is not None:  # the run's held-out clips say nothing about other data
        options = replace(options, speaker=None, pattern=None)
    return open_sound(spec, options, symbols)


def _folded(phones: list[str], unit: str) -> list[str]:
    """Return the classes of the phones of a transcript."""
    if unit == CHARACTERS:
        raise KinformerError(
            "`fold` timit39: is for transcripts of phones with spaces between, but this run writes characters; train "
            "with `units` labels."
        )
    return folded(phones)


def _metrics(unit: str, errors: Errors, bits: float, options: SpeechEvaluationOptions) -> str:
    how = "greedy" if options.prefixes == 1 else plural(options.prefixes, "prefix") + options.name
    how += "" if options.fold is None else f"; folded to {options.fold}"
    kinds = f"{errors.substitutions} substituted, {errors.deletions} missing, {errors.insertions} too many"
    return (
        f"{unit.removesuffix('s')} error rate {errors.rate:.2%} ({how}; {kinds} of {errors.symbols:,}), "
        f"{bits:.4f} bits per symbol\n"
    )


def _table(rows: Rows, references: list[list[str]], heard: list[list[str]]) -> list[dict[str, Any]]:
    """Return a row of a table for every utterance: the right transcript, the model's, and the edits between them."""
    table = []
    for number, (reference, item) in enumerate(zip(references, heard, strict=True)):
        label, text = (join_symbols(some, rows.data.unit) for some in (reference, item))
        edits = count_errors([reference], [item]).edits
        table.append({"audio": rows.utterances.name(number), "label": label, "text": text, "errors": edits})
    return table


# Transcription of a file, or of speech while it is spoken.

PIECE = 0.08
"""The length of a piece of sound in seconds."""
SILENT = 2e-4
"""The range of samples from -1 to 1 below which sound is silence: some steps of 16 bits. Normalised features of silence
are noise, in which a model that never heard silence hears symbols."""
NEVER = -1e4
"""The logit of an impossible class, finite for the sums of a search."""


class Listener:
    """A model that reads sound of ``rate`` samples a second: a causal one writes at once, others at the end."""

    def __init__(self, model: StackedCausalModel | StackedWholeModel, rate: int, heard_rate: int) -> None:
        self.model: Any = model  # called as its protocol says
        self.state: State = None
        self.input: Frames.Config = input_of(model.config)
        self.causal = model.config.protocol is CausalModel
        self.resampler, self.bank = Resampler(rate, heard_rate), Filterbank(heard_rate, self.input.mels)
        self.norm: Callable[[Tensor], Tensor] = RunningNorm() if self.causal else normalised
        self.samples, self.started = torch.zeros(0), False
        self.low, self.high = inf, -inf
        self.frames = torch.zeros(self.input.width - self.input.stride, self.input.mels)

    def feed(self, samples: np.ndarray, last: bool = False) -> Tensor:
        """Return the logits [new positions, classes] of what ``samples`` [time] complete; with ``last`` of all the
        rest. While all samples are silence, nothing but the blank is possible."""
        if len(samples):
            self.low, self.high = min(self.low, float(samples.min())), max(self.high, float(samples.max()))
        self.samples = torch.cat([self.samples, self.resampler.feed(torch.from_numpy(samples), last)])
        if not (self.causal or last):
            return torch.zeros(0, 1)
        width, stride = self.input.width, self.input.stride
        features = self._features(last)
        values = self._windows(features, last) if self.causal else windows(features, width, stride)
        if not len(values):
            return torch.zeros(0, 1)
        outputs = self.model(values[None].to(device_of(self.model)), *([self.state] if self.causal else []))
        logits, self.state = outputs if self.causal else (outputs, None)
        logits = logits[0].float().cpu()
        if self.high - self.low < SILENT:
            logits = torch.full_like(logits, NEVER).index_fill(1, torch.tensor([BLANK]), 0.0)
        return logits

    def _windows(self, features: Tensor, last: bool) -> Tensor:
        """Return the complete positions [new, width, mels]; zeros complete the last one."""
        width, stride = self.input.width, self.input.stride
        frames = torch.cat([self.frames, features])
        if last:
            frames = torch.cat([frames, frames.new_zeros((width - stride - len(frames)) % stride, frames.shape[1])])
        new = (len(frames) - (width - stride)) // stride
        self.frames = frames[new * stride :]
        return frames.unfold(0, width, stride).mT if new else frames[:0]

    def _features(self, last: bool) -> Tensor:
        """Return the features of all complete frames [frames, mels]; at the end (``last``) of one frame at least."""
        if len(self.samples) < self.bank.size and (self.started or not last):
            return torch.zeros(0, self.input.mels)
        self.started = True
        features = self.bank(self.samples)
        self.samples = self.samples[len(features) * self.bank.hop :]
        return self.norm(features)


def transcribe(subject: LoadedRun, prompt: None, settings: GenerationSettings, write: Write) -> Made:
    """Write down the sound of a file, or of standard input; every piece of text is given to ``write``."""
    run, options = subject.run, settings.task_options
    audio = options.audio
    if audio is None:
        raise KinformerError("there must be sound to write down; give `audio` FILE, or `audio` - for WAV as it comes.")
    symbols, unit, rate = writing_of(run)
    between = "" if unit == CHARACTERS else " "
    decode = decoder_of(subject, symbols, unit, options.prefixes, options)
    sound_rate, pieces = _sound(audio)
    listener, path = Listener(subject.model, sound_rate, rate), Greedy()
    transcript, all_logits, heard, seconds, interrupted = "", list[Tensor](), 0, 0.0, False
    try:
        with torch.inference_mode():
            for samples, last in pieces:
                started_at = time.perf_counter()
                logits = listener.feed(samples, last)
                heard += len(samples)
                if options.prefixes == 1:
                    numbers = path.feed(logits)
                else:
                    all_logits += [logits] if len(logits) else []
                    numbers = decode(torch.cat(all_logits)) if last else []
                for symbol in numbers:
                    text = (between if transcript else "") + symbols[symbol - 1]
                    transcript += text
                    if write is not None:
                        write(text)
                seconds += time.perf_counter() - started_at
    except KeyboardInterrupt:
        interrupted = True
    sound_seconds, state_bytes = heard / sound_rate, 0 if listener.state is None else nbytes(listener.state)
    facts: dict[str, object] = {"run": str(run.folder), "audio": audio, "text": transcript}
    facts |= {"sound_seconds": sound_seconds, "seconds": seconds, "state_bytes": state_bytes}
    speed = f", {sound_seconds / seconds:.1f} times as fast as spoken" if seconds else ""
    state = f"state {plural(state_bytes, 'byte')}"
    return Made(facts, f"{sound_seconds:.2f} s of sound in {seconds:.3f} s{speed}; {state}", interrupted)


def writing_of(run: TrainedRun) -> tuple[list[str], str, int]:
    """Return the symbols that a run writes, their unit, and the samples a second that it hears."""
    identity = run.data.get("identity") or {}
    symbols, unit, rate = (identity.get(name) for name in ("symbols", "unit", "rate"))
    if not isinstance(symbols, list) or not isinstance(rate, int):
        raise KinformerError(f"{run.folder}: does not say which symbols it writes; give a run of speech.")
    return symbols, str(unit), rate


def _sound(audio: str) -> tuple[int, Iterator[tuple[np.ndarray, bool]]]:
    """Return the rate of sound, and its pieces, each with whether it is the last."""
    if audio == "-":
        stream = WavStream(sys.stdin.buffer)
        return stream.rate, _ended((stream.read(PIECE) for _ in itertools.count()), "standard input")
    samples, rate = read_sound(audio)
    step = max(1, round(PIECE * rate))
    return rate, _ended((samples[at : at + step] for at in range(0, len(samples) + step, step)), audio)


def _ended(pieces: Iterator[np.ndarray], place: str) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield ``pieces`` up to the first empty one, which is the last."""
    any_came = False
    for piece in pieces:
        any_came |= len(piece) > 0
        if not any_came:
            raise KinformerError(f"{place}: holds 0 samples; record it again.")
        yield piece, not len(piece)
        if not len(piece):
            return


# The transcripts of sound files.


def predict(
    subject: LoadedRun, source: FileSource, settings: PredictionSettings, options: SpeechPredictionOptions
) -> Iterator[Predicted]:
    """Yield the transcripts of the files of ``source`` (a sound file, a folder of such, or a list), in order."""
    symbols, unit, rate = writing_of(subject.run)
    decode = decoder_of(subject, symbols, unit, options.prefixes, options)
    for file, samples, sound_rate in sounds(source, settings.first, settings.quiet, "predicting", settings.skip_bad):
        with torch.inference_mode():
            logits = Listener(subject.model, sound_rate, rate).feed(samples, last=True)
        heard = decode(logits)
        transcript = join_symbols([symbols[symbol - 1] for symbol in heard], unit)
        # p(transcript | sound): the sum over the paths to the symbols that were heard
        targets, counts = torch.tensor([heard or [1]]), torch.tensor([len(heard)])
        probability = exp(-float(ctc_nats(logits[None], torch.tensor([len(logits)]), targets, counts)))
        row = {"audio": str(file), "text": transcript, "probability": probability}
        row["sound_seconds"] = len(samples) / sound_rate
        yield Predicted(row, f"{file}\t{transcript}")


def sounds(
    source: FileSource, limit: int | None, quiet: bool, doing: str, skip_bad: bool = False
) -> Iterator[tuple[Path, np.ndarray, int]]:
    """Yield the files of ``source`` (a WAV or FLAC file, a folder of such files, or a list of paths) in order, each
    with its samples [time] and their rate; at most ``limit`` files. ``doing`` is the text of the progress bar.
    ``skip_bad``: note the files that cannot be read, and leave them out.
    The heads of all files are looked at before the first is read."""
    files = [file for file, _ in readable(_files(source)[:limit], sound_info, skip_bad)]
    for file, sound in track(readable(files, read_sound, skip_bad), len(files), quiet, doing):
        yield file, *sound


def _files(source: FileSource) -> list[Path]:
    """Return the paths of ``source``: a file, the files of a folder and its subfolders in order, or a list of paths."""
    if source == STDIN:
        raise KinformerError("-: sound files are not read from standard input; give a folder, or a WAV or FLAC file.")
    if not isinstance(source, str | Path):
        return [Path(file) for file in source]
    path = Path(source).expanduser()
    with reading_corpus(path):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in inside if file == path or (file.suffix.lower() in ENDINGS and file.is_file())]
    if not files:
        raise KinformerError(f"{path}: does not hold sound; give a WAV or FLAC file, or a folder of such files.")
    return files


# Vectors of sound files: the last hidden states of a run of speech, one vector for each file.


def embed(subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the vectors of the files of ``source`` (a WAV or FLAC file, a folder, or a list of paths), in order."""
    model, heard_rate = subject.model, writing_of(subject.run)[2]
    bank = Filterbank(heard_rate, model.config.input.mels)
    for file, samples, rate in sounds(source, settings.first, settings.quiet, "embedding", settings.skip_bad):
        heard = Resampler(rate, heard_rate).feed(torch.from_numpy(samples), True)
        frames = features_of(heard, bank, model.config)[None].to(device_of(model))
        with torch.inference_mode():
            states = model.hidden(frames)[0]
            vectors = pooled(states, states.new_ones(states.shape[:2], dtype=torch.bool), settings.pooling)
        yield Embedded("audio", str(file), vectors[0].numpy())
