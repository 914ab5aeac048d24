"""The task of masked tokens (Devlin et al. 2019): its rows, its objectives, its measures, and filled masks.

A training row is a window of text between BOS and EOS with some tokens replaced; only their positions have labels:

    text        the  cat   sat   on  the  mat
    tokens      BOS  the  MASK  sat  on   a   mat  EOS
    positions   2    5    0           "cat" is masked, the second "the" replaced by "a"
    labels      cat  the  IGNORED     a row with fewer masks than others is filled up
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import islice
from math import isfinite, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import WholeModel, device_of
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State
from kinformer.lab.data import IGNORED, BosEos, Corpus, Rows, Tokenizer
from kinformer.lab.data.labelled import TextItem, TextSource
from kinformer.lab.data.masking import Bigrams, MaskedRows, MaskedText, Masking, Words, ordinary
from kinformer.lab.tables import PredictionTable
from kinformer.lab.tasks.classify import scored
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    part_of,
    track,
)
from kinformer.lab.tasks.options import MaskPredictionOptions, MlmOptions
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.tasks.texts import (
    SPECIAL_TOKENS,
    TextReader,
    check_ids,
    check_long_enough,
    ends_of,
    held_out,
    mask_token_of,
    texts_in,
    tokenizer_of,
    whole_length,
)
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, map_fields, stretch_of_rows
from kinformer.lab.training.logging import ACCURACY, bits_per_masked
from kinformer.lab.training.optimisers import swapped
from kinformer.lab.training.settings import Settings
from kinformer.models.encoder import Encoder
from kinformer.runtime.errors import KinformerError, plural, require_finite

# Rows of text with masked tokens for an encoder, and the objective of predicting them.

HEAD = "masked_language"


class MaskedBatch(NamedTuple):
    """``tokens`` [batch, time] int64, ``valid`` bool or None, and the ``labels`` [batch, n] of the tokens at
    ``positions`` [batch, n], IGNORED where there are fewer."""

    tokens: Tensor
    valid: Tensor | None
    labels: Tensor
    positions: Tensor

    @classmethod
    def of(cls, rows: Rows) -> MaskedBatch:
        """Make a batch of rows of tokens and their masks."""
        assert rows.positions is not None
        valid = None if rows.valid is None else torch.from_numpy(rows.valid)
        tokens, labels, positions = (torch.from_numpy(field) for field in (rows.tokens, rows.labels, rows.positions))
        return cls(tokens, valid, labels, positions)

    @property
    def size(self) -> int:
        return self.tokens.numel()

    def stretch(self, number: int, count: int) -> MaskedBatch:
        """Return stretch ``number`` of ``count`` of the rows' time, with the masked tokens in it."""
        tokens, valid = stretch_of_rows(self.tokens, self.valid, number, count)
        positions = self.positions - number * tokens.shape[1]
        here = (self.labels != IGNORED) & (positions >= 0) & (positions < tokens.shape[1])
        first = torch.argsort((~here).to(torch.int8), dim=1, stable=True)[:, : max(1, int(here.sum(1).max()))]
        labels, positions, here = (item.gather(1, first) for item in (self.labels, positions, here))
        return MaskedBatch(tokens, valid, labels.masked_fill(~here, IGNORED), positions.where(here, 0))


COUNTED = 1 << 20
"""The most tokens of training text whose counts are the baseline beside a training."""


class MaskedTokens(DataModule):
    """Windows of text with masked tokens, other ones at every step, and the same ones in every validation."""

    sums = ("nats", "correct")
    by_time = True

    def __init__(self, corpus: Corpus, settings: Settings, masking: Masking, ends: BosEos) -> None:
        corpus.require_single("mlm")
        self.bits = bits_per_masked(unit_of(corpus))
        self.metrics = (self.bits, ACCURACY)
        train, splits = corpus.splits["train"], corpus.splits["validation"].take(settings.validation_tokens)
        self.text = MaskedText(train, settings.length, masking, ends, settings.seed)
        self.held_out = MaskedText(splits, settings.length, masking, ends, 0)
        self.sampler = self.text.sampler(settings.batch_size)
        self.batch_size = settings.batch_size

    @property
    def validations(self) -> int:
        return -(-len(self.held_out) // self.batch_size)

    def batch(self, step: int, rank: int, world: int) -> MaskedBatch:
        return MaskedBatch.of(self.text.batch(self.sampler, step, rank, world))

    def validation(self, rank: int, world: int) -> Iterator[MaskedBatch]:
        for shown in self.held_out.in_order(self.batch_size):
            yield MaskedBatch.of(shown.rows.share(rank, world))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {self.bits.name: means["nats"] / log(2), ACCURACY.name: means["correct"]}

    def baselines(self) -> dict[str, float]:
        counts = Bigrams(self.text.split.take(COUNTED))
        bits = np.concatenate([bits_by_counts(counts, shown) for shown in self.held_out.in_order(self.batch_size)], 1)
        return dict(zip(("unigram_bits", "bigram_bits"), bits.mean(1).tolist(), strict=True))


def bits_by_counts(counts: Bigrams, shown: MaskedRows) -> np.ndarray:
    """Return the bits [2, masks] of masked tokens by frequency alone, and by frequency after the token before."""
    masks = shown.rows.labels != IGNORED
    return -np.log2(np.stack(counts.probabilities(shown.rows.labels[masks], shown.before[masks])))


class MaskedLanguage:
    """Mean cross-entropy of the tokens that stood at ``batch.positions`` (Devlin et al. 2019, section 3.1).
    The head computes logits of these positions alone."""

    reads_hidden = True
    by_token = True

    def __call__(self, model: WholeModel, batch: MaskedBatch, state: State, progress: float) -> ObjectiveOutput:
        return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid).long_input, batch)


def masked_tokens(model: WholeModel, hidden_states: Tensor, batch: MaskedBatch) -> ObjectiveOutput:
    """Return the cross-entropy of the predictions from ``hidden_states`` [batch, time, dim] at ``batch.positions``."""
    return scored(masked_logits(model, hidden_states, batch), batch.labels)


def masked_logits(model: WholeModel, hidden_states: Tensor, batch: MaskedBatch) -> Tensor:
    """Return the logits [batch, n, vocab] of ``hidden_states`` [batch, time, dim] at ``batch.positions`` [batch, n]."""
    index = batch.positions[..., None].expand(-1, -1, hidden_states.shape[-1])
    return model.logits(hidden_states.gather(1, index))


def unit_of(corpus: Corpus) -> str:
    """Return the unit of the corpus in words: a byte, or a tokenizer's token."""
    return "byte" if corpus.splits["train"].encoded_from is None else "token"


def masking_of(config: ModelConfig, tokenizer: Tokenizer | None, options: MlmOptions) -> Masking:
    """Return how tokens are masked for an encoder."""
    mask = mask_token_of(config)
    if mask is None:
        raise KinformerError("this model does not have a mask token; give one, as in `set` input.mask_token=103.")
    if hasattr(config.head, "classes"):
        raise KinformerError(f"the head {config.head.kind!r} does not predict masked tokens; use kinformer.load.")
    assert tokenizer is not None
    special = {token for token in (mask, *ends_of(config)) if token is not None}
    usual = ordinary(tokenizer.vocab_size, special)
    return Masking(mask, usual, options.mask_share, Words.of(tokenizer) if options.whole_words else None)


def vocab_size(data: Corpus) -> int:
    """Return how many ids a model of the corpus must know."""
    return data.tokenizer.vocab_size + SPECIAL_TOKENS


def fit(config: ModelConfig, data: Corpus | None) -> dict[str, object]:
    """Return the overrides: a head that predicts masked tokens."""
    return {} if config.head.kind == HEAD else {"head": HEAD}


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the tokens of the corpus, and a corpus shorter than its rows."""
    check_ids(plan, model, plan.data.tokenizer.vocab_size)
    check_long_enough(plan.data, 1, plan.settings.length)


def training_rows(plan: TrainingPlan) -> MaskedTokens:
    """Return the rows of training."""
    masking = masking_of(plan.config, plan.tokenizer, plan.options)
    return MaskedTokens(plan.data, plan.settings, masking, ends_of(plan.config))


# Masked tokens, and masked sentences that their global tokens predict (Ainslie et al. 2020, ETC; contrastive
# predictive coding after van den Oord et al. 2018).
#
# All tokens of some sentences of the long input are masked. The output of the global token of such a sentence is
# compared with the outputs where one masked sentence is the whole long input: of all sentences masked in the batch, its
# own sentence should be the nearest.
#
#     loss = 0.8 * (nats of masked tokens) + 0.2 * (-log softmax_s(g_i . h_s / sqrt(dim))[i])
#
# g are the global tokens' outputs in their texts, h the outputs for the sentences alone. Both are standardised feature
# by feature over the batch, because their common part, at first nearly everything, distinguishes no sentence. Tokens of
# masked sentences are not predicted one by one.

SHARE, WEIGHT, EPS = 0.1, 0.2, 1e-5


class MaskedSentences(NamedTuple):
    """``sentences`` int64 [batch, n] to mask; the ``real`` ones count. ``positions`` [batch, n, length] are the
    positions of their tokens."""

    sentences: Tensor
    real: Tensor
    positions: Tensor


class MaskedLanguageCpc:
    """Masked language modelling with contrastive predictive coding, for an encoder whose global input has a token for
    every sentence of ``length`` tokens.

    A tenth of the sentences is masked, one at least; such are whole and hold none of the tokens ``ends``. In eval mode
    the choice is always the same. Further metrics: ``cpc_nats``, ``cpc_predicted``, ``cpc_correct``, and
    ``cpc_by_chance``, how many would be right by chance.
    """

    reads_hidden = True

    def __init__(self, length: int, mask_token: int, ends: tuple[int, ...] = ()) -> None:
        self.length, self.mask_token, self.ends = length, mask_token, ends

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None = None) -> MaskedLanguageCpc:
        """Make the objective for ``model``, from which it takes the length of sentences and the mask token;
        KinformerError if the model lacks either."""
        length = getattr(getattr(model, "global_input", None), "length", None)
        if length is None or (mask := mask_token_of(part_of(model, "config"))) is None:
            raise KinformerError(
                f"the objective 'mlm-cpc' needs an encoder with a mask token and a global token for every sentence, "
                f"which this {type(model).__name__} is not; train the member etc, or with masked-language."
            )
        ends = tuple(token for token in ends_of(part_of(model, "config")) if token is not None)
        return cls(length, mask, ends)

    def __call__(self, model: Any, batch: MaskedBatch, state: State, progress: float) -> ObjectiveOutput:
        chosen = self.choose(batch, fresh=model.training)
        if chosen is None:
            return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid).long_input, batch)
        encoded = model.hidden(self.mask(batch.tokens, chosen), valid=batch.valid)
        loss, metrics, _ = masked_tokens(model, encoded.long_input, self.left(batch, chosen))
        index = chosen.sentences[..., None].expand(-1, -1, encoded.global_input.shape[-1])
        alone = restored(batch).gather(1, chosen.positions.flatten(1)).view(-1, self.length)
        contexts = encoded.global_input.gather(1, index).flatten(0, 1)
        cpc, cpc_metrics, _ = contrasted(contexts, model.hidden(alone).global_input[:, 0], chosen.real.flatten())
        metrics |= {f"cpc_{name}": value for name, value in cpc_metrics.items()}
        metrics["cpc_by_chance"] = (cpc_metrics["predicted"] > 0).to(torch.int64)
        return (1 - WEIGHT) * loss + WEIGHT * cpc, metrics, None

    def choose(self, batch: MaskedBatch, fresh: bool) -> MaskedSentences | None:
        """Choose sentences to mask, by a ``fresh`` draw or always the same; None if the rows cannot hold one."""
        tokens = batch.tokens
        count = tokens.shape[1] // self.length
        if not count:
            return None
        usable = torch.ones_like(tokens, dtype=torch.bool) if batch.valid is None else batch.valid.clone()
        for end in self.ends:
            usable &= tokens != end
        fit = usable[:, : count * self.length].unflatten(1, (count, self.length)).all(2)
        fit &= (batch.labels != IGNORED).any(1, keepdim=True)
        generator = None if fresh else torch.Generator(tokens.device).manual_seed(0)
        draws = torch.rand(fit.shape, generator=generator, device=tokens.device).masked_fill(~fit, -1)
        sentences = draws.topk(max(1, round(SHARE * count)), dim=1).indices
        positions = sentences[..., None] * self.length + torch.arange(self.length, device=tokens.device)
        return MaskedSentences(sentences, fit.gather(1, sentences), positions)

    def mask(self, tokens: Tensor, chosen: MaskedSentences) -> Tensor:
        """Return ``tokens`` with every token of the chosen sentences masked."""
        return tokens.masked_fill(_within(tokens, chosen), self.mask_token)

    def left(self, batch: MaskedBatch, chosen: MaskedSentences) -> MaskedBatch:
        """Return ``batch`` without the labels in the chosen sentences."""
        inside = _within(batch.tokens, chosen).gather(1, batch.positions)
        return batch._replace(labels=batch.labels.masked_fill(inside, IGNORED))


def contrasted(contexts: Tensor, alone: Tensor, real: Tensor) -> ObjectiveOutput:
    """Score how well every context identifies its sentence: ``contexts`` and ``alone`` [n, dim], ``real`` [n]."""
    contexts, alone = (_standardised(x.float(), real) for x in (contexts, alone))
    logits = (contexts @ alone.mT * contexts.shape[-1] ** -0.5).masked_fill(~real, torch.finfo(torch.float32).min)
    labels = torch.arange(len(real), device=real.device).masked_fill(~real, IGNORED)
    return scored(logits, labels)


def _standardised(x: Tensor, real: Tensor) -> Tensor:
    """Return x [n, dim] with mean 0 and variance 1 of every feature over the ``real`` rows."""
    count = real.sum().clamp_min(1)
    x = torch.where(real[:, None], x, 0)
    centred = torch.where(real[:, None], x - x.sum(0) / count, 0)
    return centred * (centred.square().sum(0) / count + EPS).rsqrt()


def restored(batch: MaskedBatch) -> Tensor:
    """Return the tokens of ``batch`` before some were masked."""
    counted = batch.labels != IGNORED
    # Positions that do not count would overwrite others: let them write behind the row.
    positions = batch.positions.masked_fill(~counted, batch.tokens.shape[1])
    return functional.pad(batch.tokens, (0, 1)).scatter(1, positions, batch.labels)[:, :-1]


def _within(tokens: Tensor, chosen: MaskedSentences) -> Tensor:
    """Return whether each token is of a chosen sentence, [batch, time] bool."""
    real = chosen.real[..., None].expand_as(chosen.positions).flatten(1)
    inside = torch.zeros_like(tokens, dtype=torch.bool)
    return inside.scatter(1, chosen.positions.flatten(1), real)


# How well a model predicts masked tokens, and how well counting does on the very same ones.

AROUND = 16
"""Tokens of the text that a table shows on either side of a mask."""


class MaskedMeasurement(NamedTuple):
    """Metrics of ``masked`` tokens in ``windows`` windows: bits per token, the share predicted right, and bits by
    frequency (``unigram_bits``) and by frequency after the true token before it (``bigram_bits``), as counted in the
    training data."""

    bits: float
    accuracy: float
    masked: int
    windows: int
    unigram_bits: float
    bigram_bits: float


def measure_masked(
    model: WholeModel,
    text: MaskedText,
    counts: Bigrams,
    rows: int,
    quiet: bool = True,
    note: Callable[[MaskedBatch, Tensor], None] = lambda batch, logits: None,
) -> MaskedMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which changes nothing else;
    ``note`` gets every batch and its logits at the masks."""
    device, sums = device_of(model), np.zeros(5)
    with torch.inference_mode():
        for shown in track(text.in_order(rows), len(text), quiet, size=lambda item: len(item.rows.tokens)):
            batch = map_fields(MaskedBatch.of(shown.rows), lambda field: field.to(device))
            logits = masked_logits(model, model.hidden(batch.tokens, valid=batch.valid).long_input, batch)
            _, sums_of_batch, _ = scored(logits, batch.labels)
            scores = [float(sums_of_batch[name]) for name in ("nats", "predicted", "correct")]
            sums += [*scores, *bits_by_counts(counts, shown).sum(1)]
            require_finite(isfinite(sums[0]))
            note(batch, logits)
    nats, masked, correct, unigram, bigram = sums.tolist()
    bits, by_counts = nats / log(2) / masked, (unigram / masked, bigram / masked)
    return MaskedMeasurement(bits, correct / masked, int(masked), len(text), *by_counts)


def table_of_masks(
    batch: MaskedBatch, logits: Tensor, tokenizer: Tokenizer, ends: BosEos
) -> Iterator[dict[str, str | float | bool]]:
    """Yield a row for every masked token of a batch, whose masks have the ``logits`` [batch, n, vocab]: the text around
    it, the token, the most probable one and its probability."""

    def text_of(tokens: Sequence[int]) -> str:
        # Without ids that the tokenizer lacks, such as the mask token's.
        return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])

    shares, best = logits.float().softmax(-1).max(-1)
    for row, tokens in enumerate(batch.tokens):
        masks = batch.labels[row] != IGNORED
        places, labels = batch.positions[row][masks], batch.labels[row][masks]
        tokens = tokens.index_put((places,), labels)
        if batch.valid is not None:
            tokens = tokens[batch.valid[row]]
        text = tokens[ends.before : len(tokens) - (ends.size - ends.before)].tolist()
        columns = (places - ends.before, labels, best[row][masks], shares[row][masks])
        for at, label, guess, share in zip(*(column.tolist() for column in columns), strict=True):
            around = f"{text_of(text[max(0, at - AROUND) : at])}[MASK]{text_of(text[at + 1 : at + 1 + AROUND])}"
            answer = {"label": text_of([label]), "token": text_of([guess]), "probability": share}
            yield {"text": around, **answer, "correct": label == guess}  # two bytes outside any text look alike


def evaluate(subject: LoadedRun, settings: EvaluationSettings, table: PredictionTable, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out text, beside counts of its training split; its global input too, where it has one.
    Every masked token is written to the ``table`` that the options name."""
    run, model = subject.run, subject.model
    held = held_out(run, settings)
    masking, length = masking_of(model.config, run.tokenizer, run.options), whole_length(run, model)
    masked_text = MaskedText(held.split, length, masking, ends_of(model.config), settings.seed)
    started_at = time.perf_counter()
    rows = max(1, settings.chunk // length)
    with table.writing_predictions() as write:

        def note(batch: MaskedBatch, logits: Tensor) -> None:
            if write is not None:
                for row in table_of_masks(batch, logits, tokenizer_of(run), ends_of(model.config)):
                    write(row)

        measured = measure_masked(model, masked_text, Bigrams(held.data.splits["train"]), rows, quiet, note)
    unit, words = unit_of(held.data), ", whole words" if run.options.whole_words else ""
    metric = bits_per_masked(unit)
    text = [
        f"{measured.bits:.4f} {metric.unit}, {measured.accuracy:.1%} found: {measured.masked:,} masked in windows of "
        f"{plural(length, 'token')}{words}",
        f"{measured.unigram_bits:.4f} by their frequency in the training split",
        f"{measured.bigram_bits:.4f} by their frequency after the true {unit} before them",
    ]
    metrics = {metric: measured.bits, ACCURACY: measured.accuracy}
    baselines = {"unigram_bits": measured.unigram_bits, "bigram_bits": measured.bigram_bits}
    facts: dict[str, object] = {**baselines, "masked": measured.masked, **asdict(run.options)}
    facts |= {"length": length, "windows": measured.windows}
    if has_global_input(model):
        effect = measure_global_input(model, masked_text, run.training.get("batch_size", rows), quiet)
        facts["global_input"] = effect._asdict()
        zeroed = f"{effect.zeroed:.4f} with the vectors of the global tokens zeroed"
        text.append(f"{zeroed}, {effect.without:.4f} without these")
        if run.training.get("objective") == "mlm-cpc":
            text.append(
                f"{effect.accuracy:.1%} of {plural(effect.sentences, 'masked sentence')} identified by their global "
                f"tokens (by chance: {effect.chance:.1%})"
            )
    return held.report(subject, metrics, text, facts=facts, baselines=baselines, task="mlm", since=started_at)


class GlobalInputMeasurement(NamedTuple):
    """The gain from the global input of ETC (Ainslie et al. 2020), a token for each sentence before the long input.

    ``bits`` of a masked token are the whole model's, ``zeroed`` the bits with zero vectors for its global tokens,
    ``without`` the bits without global tokens.

    ``accuracy`` is over the ``sentences`` masked as a whole: the share whose global token was nearest to the global
    token of the sentence alone, among the sentences masked in the same rows. ``chance`` is this share by guessing.
    """

    bits: float
    zeroed: float
    without: float
    sentences: int
    accuracy: float
    chance: float


def has_global_input(model: nn.Module) -> bool:
    """Return whether ``model`` has a global token for every sentence of the long input."""
    return hasattr(getattr(model, "global_input", None), "length")


def measure_global_input(model: Encoder, text: MaskedText, rows: int, quiet: bool = True) -> GlobalInputMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which come from all over it."""
    device, objective = device_of(model), MaskedLanguageCpc.of(model)
    totals: dict[str, float] = defaultdict(float)
    for shown in track(text.in_order(rows, shuffled=True), len(text), quiet, size=lambda item: len(item.rows.tokens)):
        batch = map_fields(MaskedBatch.of(shown.rows), lambda field: field.to(device))
        none = torch.full_like(batch.tokens, -1)
        with torch.inference_mode():
            nats = {"": _nats(model, batch), "without_": _nats(model, batch, sentences=none)}
            nats["sentences_"] = objective(model, batch, None, 1.0)[1]
        with silenced(model), torch.inference_mode():
            nats["zeroed_"] = _nats(model, batch)
        for name, metrics in nats.items():
            for key, value in metrics.items():
                totals[name + key] += float(value)
        require_finite(isfinite(sum(totals.values())))
    count = totals["sentences_cpc_predicted"]
    predicted = log(2) * max(1.0, totals["predicted"])
    whole, zeroed, without = (totals[f"{name}nats"] / predicted for name in ("", "zeroed_", "without_"))
    accuracy, chance = (totals[f"sentences_cpc_{name}"] / max(1.0, count) for name in ("correct", "by_chance"))
    return GlobalInputMeasurement(whole, zeroed, without, int(count), accuracy, chance)


def silenced(model: Encoder) -> AbstractContextManager[None]:
    """Give the global tokens of ``model`` the vector 0 within the context."""
    weight: Tensor = part_of(model.global_input, "table").weight
    return swapped({"table": weight}, {"table": torch.zeros_like(weight)})


def _nats(model: Encoder, batch: MaskedBatch, sentences: Tensor | None = None) -> dict[str, Tensor]:
    """Return the sums of masked language modelling over ``batch``: nats, tokens and how many are right."""
    return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid, sentences=sentences).long_input, batch)[1]


# The most probable tokens of the masks in texts.


HOLE = -1


class MaskFiller(TextReader):
    """A run that fills masks in; ``mark`` stands for one in a text."""

    def __init__(self, subject: LoadedRun, mark: str, top_k: int) -> None:
        super().__init__(subject.run, subject.model, ends_of(subject.model.config))
        self.run, self.mark, self.top_k, self.tokenizer = subject.run, mark, top_k, tokenizer_of(subject.run)
        mask = mask_token_of(subject.model.config)
        if mask is None or hasattr(subject.model.config.head, "classes"):
            raise KinformerError(f"{subject.run.folder}: lacks a mask token or a head for masked tokens.")
        self.mask = mask

    def encode(self, item: TextItem) -> np.ndarray:
        """Return the ids of a text, HOLE for a mask; raise for a text without a mask or too long for the model."""
        pieces = item.text.split(self.mark)
        if len(pieces) < 2:
            raise KinformerError(
                f"{item.place}: does not hold a mask; write {self.mark} in place of a token, or give `mask` TEXT."
            )
        parts = [part for piece in pieces for part in (np.array([HOLE]), self.tokenizer.encode(piece))]
        joined = np.concatenate(parts[1:])
        if (longest := len(joined) + self.ends.size) > self.length:
            raise KinformerError(
                f"{item.place}: has {longest} tokens, but {self.run.folder} reads {self.length} at most, its training "
                "length; shorten the text around its masks."
            )
        return joined

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Predicted]:
        """Return the texts with their masks filled in, and the candidates for each mask."""
        tokens, valid = self.lay([ids for _, ids in batch])
        holes = tokens == HOLE
        with torch.inference_mode():
            encoded: Any = self.model.hidden(tokens.masked_fill(holes, self.mask), valid=valid)
            logits = self.model.logits(encoded.long_input[holes][None])[0].float().cpu()
        require_finite(bool(logits.isfinite().all()))
        no_text = torch.arange(logits.shape[-1]) >= self.tokenizer.vocab_size
        no_text[[token for token in (self.mask, *self.ends) if token is not None]] = True
        shares = logits.masked_fill(no_text, -torch.inf).softmax(-1)
        probabilities, numbers = shares.topk(min(self.top_k, int((~no_text).sum())))
        candidates = iter(zip(probabilities.tolist(), numbers.tolist(), strict=True))
        return [
            self._predicted(item, list(islice(candidates, count)))
            for (item, _), count in zip(batch, holes.sum(1).tolist(), strict=True)
        ]

    def _predicted(self, item: TextItem, best: list[tuple[list[float], list[int]]]) -> Predicted:
        masks: list[list[dict[str, Any]]] = []
        for shares, numbers in best:
            pairs = zip(map(self.tokenizer.decode, ([number] for number in numbers)), shares, strict=True)
            masks.append([{"token": token, "probability": share} for token, share in pairs])
        pieces = item.text.split(self.mark)
        filled = pieces[0] + "".join(mask[0]["token"] + piece for mask, piece in zip(masks, pieces[1:], strict=True))
        spelled = (", ".join(f"{guess['token']!r} {guess['probability']:.1%}" for guess in mask) for mask in masks)
        line = filled if self.top_k == 1 else f"{filled}\t{'; '.join(spelled)}"
        return Predicted.of(item, line, filled=filled, masks=masks)


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, options: MaskPredictionOptions
) -> Iterator[Predicted]:
    """Yield the texts of ``source`` with their masks filled in, in order."""
    filler = MaskFiller(subject, options.mask, settings.top_k)
    yield from filler.read(texts_in(source, settings, filler.encode), settings)
