"""The task of translation: its rows, its objectives, and BLEU and chrF of a model's translations.

A training row is a pair of lines; padding is 0 and not valid, and its labels are IGNORED ("-"):

    source   two   hundred  one      EOS   0      the encoder reads
    target   BOS   zwei     hundert  eins  0      the decoder reads
    labels   zwei  hundert  eins     EOS   -      the decoder predicts
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, lcm, log
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from kinformer.adaptive.rules import AllExits
from kinformer.adaptive.stack import ExitEncoderDecoder, source_means
from kinformer.core.model import CausalModel, SourceModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State, map_tensors
from kinformer.generation.beam import Hypothesis, Search, beam_search
from kinformer.lab.calibration.options import CalibrateOptions
from kinformer.lab.calibration.risk import Samples, at_threshold
from kinformer.lab.data import IGNORED, BosEos
from kinformer.lab.data.buckets import TokenBatches
from kinformer.lab.data.files import Extents
from kinformer.lab.data.labelled import LABEL_NAMES, TEXT_NAMES, Columns, TextItem, TextSource
from kinformer.lab.data.ngram import NgramModel
from kinformer.lab.data.pairs import NUMBER_WORDS, Languages, Pairs, Parallel, open_pairs
from kinformer.lab.data.sampling import Split
from kinformer.lab.data.tokenizer import Tokenizer, as_bytes
from kinformer.lab.evaluation.depths import LAYERS_PER_TOKEN, Exited, early_exit_stack, noting_exits, saved, with_rule
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    TrainedRun,
    Write,
    arriving,
    in_batches,
    parts_of,
)
from kinformer.lab.tasks.next_token import COUNTED_BYTES, NGRAM_CONTEXT, Generated, Sample
from kinformer.lab.tasks.options import BeamOptions, TranslateEvaluationOptions, TranslateOptions
from kinformer.lab.tasks.task import GenerationSettings, Source, TrainingPlan
from kinformer.lab.tasks.texts import HeldOut, check_ids, ends_of, spec_of, texts_in, tokenizer_of, vocabulary_for
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, map_fields, stretch_of_rows
from kinformer.lab.training.logging import ACCURACY, BITS_PER_BYTE, BLEU, CHRF
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, marked, plural, require_finite
from kinformer.runtime.plugins import import_extra
from kinformer.runtime.progress import note_once

# The pairs, the vocabulary of a new tokenizer, and the part that a run is measured on.

ENDS = 2
"""Ids that a model has for itself: BOS and EOS."""
OF_NUMBERS = 400
"""The size of a vocabulary of number words, which are made of some sixty pieces."""


def open_parallel(source: Source, options: TranslateOptions, cache: Path | None = None) -> Parallel:
    """Return the pairs that ``source`` names."""
    return open_pairs(source.spec, tokenizer=source.tokenizer, holdout=source.holdout, languages=options.languages)


def row_lengths(data: Parallel, config: ModelConfig) -> np.ndarray:
    """Return the tokens of the longer side of the first pairs to train on."""
    source, target = (side[:1000] for side in data.splits["train"])
    return EncodedPairs(Pairs(source, target), data.tokenizer).widths


def default_vocabulary(source: Source, options: TranslateOptions) -> int | None:
    """Return the size of a new vocabulary for both sides of the pairs; None for bytes."""
    tokens = OF_NUMBERS if source.spec == NUMBER_WORDS else None
    return vocabulary_for(sum(map(len, texts_of_both(source, options))), tokens)


def texts_of_both(source: Source, options: TranslateOptions) -> Iterable[str]:
    """Return the lines of both sides of the training split."""
    train = open_parallel(source, options).splits["train"]
    return (line.decode() for side in train for line in side)


def vocab_size(data: Parallel) -> int:
    """Return how many ids a model of the pairs must know."""
    return data.tokenizer.vocab_size + ENDS


def check_ends(config: ModelConfig) -> None:
    """Refuse a model without ids to begin and to end a translation with."""
    for name in ("bos_token", "eos_token"):
        if getattr(config.input, name, None) is None:
            raise KinformerError(
                f"the model has no {name}, with which a translation {'begins' if name[0] == 'b' else 'ends'}; give "
                f"`set` input.{name}=ID."
            )


def check_pairs(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the ids of the pairs, and languages for pairs without a choice of languages."""
    check_ids(plan, model, plan.data.tokenizer.vocab_size)
    check_ends(plan.config)
    if plan.data.name == NUMBER_WORDS and plan.options.languages != Languages():
        raise KinformerError(
            f"`source` and `target`: {plan.data.name} are numbers in English and German; leave them out."
        )


def held_out_pairs(run: TrainedRun, settings: EvaluationSettings) -> HeldOut:
    """Open the part of the pairs to measure on; a note says where it is not the run's own."""
    spec = spec_of(run, settings.data)
    holdout = None if spec == NUMBER_WORDS else run.data.get("holdout")
    return HeldOut.of(run, settings, open_parallel(Source(spec, holdout, run.tokenizer), run.options))


# Rows of pairs for an encoder-decoder, in batches of this many tokens, and the objective of translating them.

ENCODED_AT_ONCE = 1 << 12


class PairBatch(NamedTuple):
    """``source`` int64 [rows, length], with EOS; ``target`` int64 [rows, time], BOS and the translation; ``labels``
    [rows, time], the translation and EOS, IGNORED elsewhere; ``source_valid`` and ``target_valid`` bool mark the real
    tokens; ``bytes`` int64 [rows] count the bytes of the translations."""

    source: Tensor
    source_valid: Tensor
    target: Tensor
    target_valid: Tensor
    labels: Tensor
    bytes: Tensor

    @property
    def size(self) -> int:
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
        """Return the tokens of the longer side, its end included, int64 [pairs]."""
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
    """Return ids int64 [rows, longest], zero behind each row's end, and which ids are real."""
    tokens = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
    return tokens, torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


class TranslationPairs(DataModule):
    """Batches of at most ``batch_size`` x ``length`` tokens of the longer side; pairs longer than ``length`` are left
    out. Validation: the first pairs, of as many tokens as the settings say."""

    sums = ("nats", "correct", "bytes")
    by_time = True
    metrics = (BITS_PER_BYTE, ACCURACY)

    def __init__(self, data: Parallel, settings: Settings, ends: BosEos, smoothing: float) -> None:
        self.settings, self.ends, self.smoothing = settings, ends, smoothing
        self.splits = data.splits
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

    def baselines(self) -> dict[str, float]:
        train, validation = (self.splits[name].target for name in ("train", "validation"))
        counted = Extents.of_bytes(b"\n".join([b"", *train[:COUNTED_BYTES]])[:COUNTED_BYTES])
        if len(counted) <= NGRAM_CONTEXT:
            return {}
        model = NgramModel(Split.of_bytes("train", "targets", counted), NGRAM_CONTEXT)
        lines = [validation[index] for index in self.measured_pairs]
        chances = model.probabilities(np.frombuffer(b"\n".join([b"", *lines, b""]), np.uint8), 1)
        return {"targets_counted": -float(np.log2(chances).sum()) / max(1, sum(map(len, lines)))}


class TranslationLoss:
    """Mean cross-entropy of the targets' tokens, each predicted from the source and the right ones before it; in
    training ``smoothing`` of the probability is spread over all ids (Szegedy et al. 2016)."""

    reads_hidden = True
    by_token = True

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None) -> Self:
        """Make the objective with the smoothing of the rows ``data``."""
        return cls(getattr(data, "smoothing", 0.0))

    def __call__(self, model: Any, batch: PairBatch, state: State, progress: float) -> ObjectiveOutput:
        state = model.begin(batch.source, batch.source_valid)
        inputs, state = model.head_inputs(batch.target, state, valid=batch.target_valid)
        counted = batch.labels != IGNORED
        logits = model.logits(map_tensors(lambda item: item[counted][None], inputs))[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = batch.labels[counted]
        sums = sums_of(logits, labels, batch)
        loss = sums["nats"] / max(1, len(labels))
        if model.training and self.smoothing and len(labels):
            loss = functional.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return loss, sums | {"nats": sums["nats"].detach()}, state


def sums_of(logits: Tensor, labels: Tensor, batch: PairBatch) -> dict[str, Tensor]:
    """Return the sums of ``batch`` from its counted tokens' ``logits`` [tokens, vocab] and ``labels`` [tokens]."""
    correct = (logits.detach().argmax(-1) == labels).sum()
    nats, count = functional.cross_entropy(logits, labels, reduction="sum"), (batch.labels != IGNORED).sum()
    return {"nats": nats, "predicted": count, "correct": correct, "bytes": batch.bytes.sum()}


# Translations by the losses of all exits of a decoder's stack (Elbayad et al. 2020, section 3.1, for translation).


class TranslationExits(TranslationLoss):
    """The loss of translators with early exits, of the kind that the decoder's stack names, as of texts alone:

    aligned    loss = sum of w_n L_n over the exits n / sum of w_n, L_n the smoothed cross-entropy of exit n
    mixed      loss = mean of L over ``stack.samples`` runs, each with evenly drawn exits for its tokens

    Aligned training adds the loss of the stack's exit rule, if any. In eval mode this is :class:`TranslationLoss`, of
    tokens that leave by the rule.
    """

    trains_exits = True

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None) -> Self:
        """Make the objective for ``model``; KinformerError for a stack without exits."""
        if not isinstance(model, ExitEncoderDecoder):
            raise KinformerError(
                "the objective 'exits' needs a decoder whose tokens may leave early, but the model's may not; "
                "add `set` stack=exits, or leave `objective` out."
            )
        return super().of(model, data)

    def __call__(self, model: ExitEncoderDecoder, batch: PairBatch, state: State, progress: float) -> ObjectiveOutput:
        stack, counted = model.stack, batch.labels != IGNORED
        if not model.training:
            return super().__call__(model, batch, state, progress)
        if stack.config.training == "mixed":
            drawn = [TranslationLoss.__call__(self, model, batch, state, progress) for _ in range(stack.config.samples)]
            return torch.stack([loss for loss, *_ in drawn]).mean(), *drawn[-1][1:]
        state = model.begin(batch.source, batch.source_valid)
        source = source_means(state, len(batch.target))
        _, state, tapped = model.hidden(batch.target, state, valid=batch.target_valid, taps=stack.exits)
        logits = [model.exit_logits(x, number).float() for number, x in enumerate(tapped)]
        labels, smoothing = batch.labels[counted], self.smoothing
        losses = [functional.cross_entropy(value[counted], labels, label_smoothing=smoothing) for value in logits]
        seen = None
        if stack.rule is not None:
            targets = batch.labels.masked_fill(~counted, 0)
            one = torch.zeros_like(targets)  # a row is one sequence
            seen = AllExits.of(tapped, logits, targets, counted, one, source)
        return stack.aligned_loss(losses, seen, progress), sums_of(logits[-1].detach()[counted], labels, batch), state


def training_rows(plan: TrainingPlan) -> TranslationPairs:
    """Return the rows of training."""
    return TranslationPairs(plan.data, plan.settings, ends_of(plan.config), plan.options.label_smoothing)


# Lines translated in order, each written at once.

LONGER = 50
"""How many tokens a translation may have more than its source (Vaswani et al. 2017, section 6.1)."""


class Translator:
    """Translates texts with a run's model, by the beam search that ``decoding`` describes."""

    def __init__(self, subject: LoadedRun, decoding: BeamOptions) -> None:
        self.model: SourceModel = subject.model
        self.tokenizer = tokenizer_of(subject.run)
        self.ends = ends_of(subject.run.config)
        assert self.ends.bos is not None and self.ends.eos is not None
        self.state_bytes = 0
        self.search = Search(self.ends.bos, self.ends.eos, decoding.beam, decoding.length_penalty)

    def __call__(self, texts: Sequence[bytes]) -> list[Hypothesis]:
        """Return hypotheses, whose tokens :meth:`text` decodes; an empty text has an empty translation."""
        ids = self.encode(texts)
        full = [row for row in ids if len(row) > 1]
        if not full:
            return [Hypothesis([], 0.0) for _ in ids]
        tokens, valid = (item.to(device_of(self.model)) for item in padded(full))
        room = (self.model.max_length or 2**62) - 1  # BOS has a position, too
        limits = [max(1, min(len(row) + LONGER, room)) for row in full]
        with torch.inference_mode():
            searched = beam_search(self.model, self.model.begin(tokens, valid), self.search, limits)
        self.state_bytes = max(self.state_bytes, searched.state_bytes)
        best = iter(searched.best)
        return [next(best) if len(row) > 1 else Hypothesis([], 0.0) for row in ids]

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        """Return the ids of texts, with EOS. Errors: ``KinformerError`` for a text longer than the model reads."""
        ids = [[*item.tolist(), self.search.eos] for item in self.tokenizer.encode_batch(texts)]
        longest = self.model.max_source_length
        for text, row in zip(texts, ids, strict=True):
            if longest is not None and len(row) > longest:
                raise KinformerError(
                    f"the line {text[:40].decode('utf-8', 'replace')!r}... has {plural(len(row), 'token')}, but the "
                    f"model reads sources of {longest} at most; split it."
                )
        return ids

    def saved(self, exited: Exited, source_tokens: int, new_tokens: int, lines: int) -> Exited:
        """Return ``exited`` with its savings in the middle of a translation; ``lines`` lines have these tokens."""
        # One more for EOS, of the source as of the translation
        return saved(self.model, exited, (new_tokens // lines + 1) // 2, source=source_tokens // lines + 1)

    def text(self, hypothesis: Hypothesis) -> str:
        """Return the hypothesis as text, in one line."""
        tokens = [token for token in hypothesis.tokens if token < self.tokenizer.vocab_size]
        return " ".join(self.tokenizer.decode(tokens).splitlines())


def check_generation(run: TrainedRun) -> None:
    """Refuse a run that cannot begin and end a translation, or a run without a tokenizer."""
    check_ends(run.config)
    tokenizer_of(run)


def translate_lines(
    subject: LoadedRun, prompt: bytes | str | Iterable[bytes], options: GenerationSettings, write: Write
) -> Generated:
    """Translate the lines of ``prompt``; each is given to ``write``, with a line's end, when all before it are there.
    Lines that come one by one are translated as they come, together with the lines that arrived meanwhile."""
    translator, result = Translator(subject, options.task_options), Generated([], 0, seed=options.seed)
    started_at = time.perf_counter()
    with noting_exits(subject.model) as leaving:
        try:
            for lines in arriving(lines_of(prompt), options.task_options.batch_size):
                for line, output in zip(lines, translator(lines), strict=True):
                    text = translator.text(output)
                    result.samples.append(Sample(output.tokens, text, stopped=True))
                    result.prompt_tokens += len(translator.tokenizer.encode(line))
                    result.new_tokens += len(output.tokens)
                    if write is not None:
                        write(text + "\n")
        except KeyboardInterrupt:
            result.interrupted = True
    result.seconds, result.state_bytes = time.perf_counter() - started_at, translator.state_bytes
    if leaving.result is not None and (count := len(result.samples)):
        result.exits = translator.saved(leaving.result, result.prompt_tokens, result.new_tokens, count)
    return result


def predict_lines(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, decoding: BeamOptions
) -> Iterator[Predicted]:
    """Yield the translations of the texts of ``source``, in order; an empty one has an empty translation."""
    translator = Translator(subject, decoding)

    def check(item: TextItem) -> None:
        try:
            translator.encode([item.text.encode()])
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    def translated(batch: Sequence[TextItem]) -> list[Predicted]:
        hypotheses = translator([item.text.encode() for item in batch])
        texts = map(translator.text, hypotheses)
        return [Predicted.of(item, text, translation=text) for item, text in zip(batch, texts, strict=True)]

    languages = (subject.run.data.get("identity") or {}).get("languages", ())
    usual = [[kind, *languages[side : side + 1]] for side, kind in enumerate(("source", "target"))]
    columns = Columns(text_names=(*TEXT_NAMES, *usual[0]), label_names=(*LABEL_NAMES, *usual[1]), text_first=True)
    inputs = texts_in(source, settings, check, columns)
    yield from in_batches(
        inputs.items, settings.batch_size, lambda item: len(item.text), translated, inputs.total, settings.quiet
    )


def lines_of(prompt: bytes | str | Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text, or lines that come one by one, without their ends; raise unless they are UTF-8."""
    if isinstance(prompt, str):
        prompt = as_bytes(prompt)
    lines = prompt.removesuffix(b"\n").split(b"\n") if isinstance(prompt, bytes) else prompt
    for number, line in enumerate(lines, start=1):
        line = line.rstrip(b"\r\n")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise KinformerError(
                f"line {number} of the input is not UTF-8 (byte {line[error.start]:#04x}); convert it first, as with "
                "iconv."
            ) from None
        yield line


class PairSamples(Samples):
    """Samples of pairs for a calibration of early exits: sources, and their translations by beam search.
    The sources are evenly drawn from a part of the pairs; the truth is the reference."""

    def __init__(self, run: TrainedRun, model: CausalModel, options: CalibrateOptions) -> None:
        check_generation(run)
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(options, name) is not None:
                raise KinformerError(
                    f"{marked(name)} {getattr(options, name)}: is of running text; a sample of this run is a whole "
                    "source and its translation, so leave it out."
                )
        decoding = BeamOptions() if options.beam is None else BeamOptions(beam=options.beam)
        held = held_out_pairs(run, EvaluationSettings(data=options.data, split=options.split))
        how = {"beam": decoding.beam, "length_penalty": decoding.length_penalty}
        super().__init__(model, held.identity, how)
        count = len(held.split.source)
        if count < options.prompts:
            raise KinformerError(
                f"split {options.split!r} of {held.data.name} holds {plural(count, 'pair')}, too few for "
                f"{options.prompts} samples; give another by `split`, or fewer by `prompts`."
            )
        draw = np.random.default_rng(options.seed)
        pairs = held.split.taken(draw.choice(count, options.prompts, replace=False).tolist())
        # Sources of like length are translated together.
        pairs = pairs.taken(sorted(range(options.prompts), key=lambda index: len(pairs.source[index])))
        self.translator, self.sources = Translator(LoadedRun(run, model), decoding), pairs.source
        self.batch_size = options.batch_size
        self.truth = [ids.tolist() for ids in tokenizer_of(run).encode_batch(pairs.target)]
        self.begin()

    def write(self) -> list[list[int]]:
        return [
            hypothesis.tokens
            for part in parts_of(len(self.sources), self.batch_size)
            for hypothesis in self.translator(self.sources[part])
        ]

    def saved(self, threshold: float) -> Exited:
        count = len(self.sources)
        sources, written = (sum(map(len, side)) for side in (self.translator.encode(self.sources), self.whole))
        with at_threshold(self.model, threshold):
            return self.translator.saved(self.exits[threshold], sources - count, written, count)


# BLEU and chrF of a run's translations, by sacrebleu, beside the untranslated source.

EXAMPLES = 3


class Scores(NamedTuple):
    """Corpus BLEU and chrF of some translations, and sacrebleu's signatures, which say how they were computed."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def scores(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Return corpus BLEU and chrF, one reference a line, by the package sacrebleu (Post 2018) and its defaults: n-grams
    of up to 4 tokens of the tokenization 13a, upper and lower case apart, exponential smoothing of orders without a
    match, and exp(1 - reference / translation) as brevity penalty of a corpus that is too short.

    Errors: ``KinformerError`` where the package is missing.
    """
    library = import_extra("sacrebleu.metrics", "the score of translations", "sacrebleu", "'kinformer[translate]'")
    metrics = library.BLEU(), library.CHRF()
    values = [metric.corpus_score(list(translations), [list(references)]).score for metric in metrics]
    return Scores(*values, *(str(metric.get_signature()) for metric in metrics))


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: TranslateEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out pairs: how well it predicts the references, and how similar its translations are."""
    check_ends(subject.run.config)
    held = held_out_pairs(subject.run, settings)
    pairs = Pairs(*(side[: settings.first] for side in held.split))
    scores([""], [""])  # before an hour's work
    started_at = time.perf_counter()
    bits = bits_per_byte(subject, held.data, pairs, settings.chunk)
    with noting_exits(subject.model) as leaving:
        translations = translated(subject, pairs, options, quiet)
    seconds = time.perf_counter() - started_at
    sources, references = ([line.decode() for line in side] for side in pairs)
    scored, copied = scores(translations, references), scores(sources, references)
    metrics = {BLEU: scored.bleu, CHRF: scored.chrf, BITS_PER_BYTE: bits}
    exits, beside, lines = beside_all_layers(subject, pairs, options, leaving.result, quiet)
    metrics |= {} if exits is None else {LAYERS_PER_TOKEN: exits.layers_per_token}
    how = "greedy" if options.beam == 1 else f"beam {options.beam}, length penalty {options.length_penalty:g}"
    half = len(translations) // 2  # a translation of another line tells nothing of its source
    others = scores([*translations[half:], *translations[:half]], references)
    baselines = {"copy_bleu": copied.bleu, "copy_chrf": copied.chrf, "shuffled_bleu": others.bleu}
    examples = [
        {"source": source, "translation": translation, "reference": reference}
        for source, translation, reference in zip(sources, translations, references, strict=True)
    ]
    options.write_predictions(examples)
    facts = {**baselines, **beside, "signatures": [scored.bleu_signature, scored.chrf_signature]}
    facts |= {"pairs": len(references), "beam": options.beam, "length_penalty": options.length_penalty}
    facts |= {"examples": examples[:EXAMPLES], "seconds": seconds}
    text = (
        f"BLEU {scored.bleu:.2f}, chrF2 {scored.chrf:.2f} of {plural(len(references), 'translation')} "
        f"({how}); the untranslated source has BLEU {copied.bleu:.2f}, chrF2 {copied.chrf:.2f}, "
        f"the translations of other lines BLEU {others.bleu:.2f}",
        f"{bits:.4f} bits per byte of the references\n",
        *lines,
        *("".join(f"{name:11}  {value}\n" for name, value in example.items()) for example in examples[:EXAMPLES]),
        f"BLEU  {scored.bleu_signature}\nchrF2 {scored.chrf_signature}",
    )
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="translate")


def beside_all_layers(
    subject: LoadedRun, pairs: Pairs, options: TranslateEvaluationOptions, exits: Exited | None, quiet: bool
) -> tuple[Exited | None, dict[str, object], tuple[str, ...]]:
    """Return the savings of early exits, with facts and text that compare the translations by all layers; nothing where
    no token could leave early."""
    if exits is None:
        return None, {}, ()
    translator = Translator(subject, options)
    with with_rule(early_exit_stack(subject.model), None):
        translations = translated(subject, pairs, options, quiet)
    references = [line.decode() for line in pairs.target]
    both = pairs.source, [text.encode() for text in translations]
    sources, written = (sum(map(len, translator.tokenizer.encode_batch(side))) for side in both)
    exits = translator.saved(exits, sources, written, len(references))
    all_layers = scores(translations, references)
    facts = {"exits": exits.facts, "all_layers_bleu": all_layers.bleu, "all_layers_chrf": all_layers.chrf}
    text = f"{exits.text}, which have BLEU {all_layers.bleu:.2f}, chrF2 {all_layers.chrf:.2f}\n"
    return exits, facts, (text,)


def bits_per_byte(subject: LoadedRun, data: Parallel, pairs: Pairs, tokens: int) -> float:
    """Return the bits per byte of the references, each predicted from its source, about ``tokens`` tokens at a time."""
    model, loss, nats, count = subject.model, TranslationLoss(0.0), 0.0, 0
    encoded, ends, device = EncodedPairs(pairs, data.tokenizer), ends_of(subject.run.config), device_of(subject.model)
    batches = TokenBatches(encoded.widths, tokens, 0)
    with torch.inference_mode():
        for step in range(batches.batches):
            batch = map_fields(encoded.batch(batches.indices(step), ends), lambda field: field.to(device))
            _, sums_of_batch, _ = loss(model, batch, None, 1.0)
            nats, count = nats + float(sums_of_batch["nats"]), count + int(sums_of_batch["bytes"])
    require_finite(isfinite(nats))
    return nats / log(2) / count


def translated(subject: LoadedRun, pairs: Pairs, options: TranslateEvaluationOptions, quiet: bool) -> list[str]:
    """Return the translation of every source, in order; sources of similar length are translated together."""
    translator, result = Translator(subject, options), [""] * len(pairs.source)
    order = np.argsort([len(line) for line in pairs.source], kind="stable")
    for part in parts_of(len(order), options.batch_size, quiet, "translating"):
        for index, hypothesis in zip(order[part], translator([pairs.source[i] for i in order[part]]), strict=True):
            result[index] = translator.text(hypothesis)
    return result
