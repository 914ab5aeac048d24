"""How well a model predicts masked tokens, and how well counting does on the very same ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite, log

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.model import WholeModel, device_of
from kinformer.data import IGNORED, BosEos, Tokenizer
from kinformer.data.bigrams import Bigrams
from kinformer.data.masked_text import MaskedText
from kinformer.runtime.errors import require_finite
from kinformer.runtime.progress import ProgressCallback, progressing
from kinformer.runtime.tables import PredictionTable, WriteRow
from kinformer.runtime.words import plural
from kinformer.tasks.classify.rows import scored
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.mlm.cpc import GlobalInputModel, MaskedLanguageCpc
from kinformer.tasks.mlm.rows import MaskedBatch, masked_logits, masked_tokens, masking_of, unit_of
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.text import ends_of, heading, held_out, tokenizer_of, whole_length
from kinformer.tasks.shared.views import part_of
from kinformer.training.batch import map_fields
from kinformer.training.metric import ACCURACY, bits_per_masked

AROUND = 16
"""Tokens of the text that a table shows on either side of a mask."""


@dataclass(frozen=True, kw_only=True)
class MaskedMeasurement:
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
    progress: ProgressCallback | None = None,
    note: Callable[[MaskedBatch, Tensor], None] | None = None,
) -> MaskedMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which changes nothing else;
    ``note`` gets every batch and its logits at the masks."""
    device = device_of(model)
    sums, baselines, done = np.zeros(3), np.zeros(2), 0
    with torch.inference_mode():
        for shown in text.in_order(rows):
            batch = map_fields(MaskedBatch.of(shown.rows), lambda field: field.to(device))
            logits = masked_logits(model, model.hidden(batch.tokens, valid=batch.valid).long_input, batch)
            _, sums_of_batch, _ = scored(logits, batch.labels)
            sums += [float(sums_of_batch[name]) for name in ("nats", "predicted", "correct")]
            require_finite(isfinite(sums[0]))
            masks = shown.rows.labels != IGNORED
            for index, probability in enumerate(counts.probabilities(shown.rows.labels[masks], shown.before[masks])):
                baselines[index] -= np.log2(probability).sum()
            done += len(shown.rows.tokens)
            if note is not None:
                note(batch, logits)
            if progress is not None:
                progress(done, len(text))
    nats, masked, correct = sums.tolist()
    unigram, bigram = (baselines / masked).tolist()
    return MaskedMeasurement(
        bits=nats / log(2) / masked,
        accuracy=correct / masked,
        masked=int(masked),
        windows=done,
        unigram_bits=unigram,
        bigram_bits=bigram,
    )


class MaskNotes:
    """Writes a row for every masked token: the text around it, the token, the most probable one, its probability."""

    def __init__(self, tokenizer: Tokenizer, ends: BosEos, write: WriteRow) -> None:
        self.tokenizer, self.ends, self.write = tokenizer, ends, write

    def __call__(self, batch: MaskedBatch, logits: Tensor) -> None:
        """Write the rows of a batch, whose masks have the ``logits`` [batch, n, vocab]."""
        shares, best = logits.float().softmax(-1).max(-1)
        for row, tokens in enumerate(batch.tokens):
            masks = batch.labels[row] != IGNORED
            places, labels = batch.positions[row][masks], batch.labels[row][masks]
            tokens = tokens.index_put((places,), labels)
            if batch.valid is not None:
                tokens = tokens[batch.valid[row]]
            text = tokens[self.ends.before : len(tokens) - (self.ends.size - self.ends.before)].tolist()
            columns = (places - self.ends.before, labels, best[row][masks], shares[row][masks])
            for line in self._rows(text, *(column.tolist() for column in columns)):
                self.write(line)

    def _rows(
        self,
        text: Sequence[int],
        places: Sequence[int],
        labels: Sequence[int],
        best: Sequence[int],
        shares: Sequence[float],
    ) -> Iterator[dict[str, object]]:
        for at, label, guess, share in zip(places, labels, best, shares, strict=True):
            before, after = self._text(text[max(0, at - AROUND) : at]), self._text(text[at + 1 : at + 1 + AROUND])
            token, predicted = self._text([label]), self._text([guess])
            text_around = f"{before}[MASK]{after}"
            right = {"correct": label == guess}  # two bytes that are no text look alike
            yield {"text": text_around, "label": token, "token": predicted, "probability": share} | right

    def _text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, without ids that are none of the tokenizer's, such as that of the mask."""
        return self.tokenizer.decode(
            np.array([token for token in tokens if token < self.tokenizer.vocab_size], np.int64)
        )


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, table: PredictionTable, quiet: bool
) -> Evaluation:
    """Evaluate a run on held-out text, beside counts of its training split; its global input too, where it has one.
    Every masked token is written to the ``table`` that the options name."""
    run, model = subject.run, subject.model
    data = held_out(run, evaluation_settings)
    masking, length = masking_of(model.config, run.tokenizer, run.options), whole_length(run, model)
    masked_text = MaskedText(data.split, length, masking, ends_of(model.config), evaluation_settings.seed)
    started_at = time.perf_counter()
    rows = max(1, evaluation_settings.chunk // length)
    with table.writing_predictions() as write, progressing(quiet) as progress:
        counts = Bigrams(data.corpus.splits["train"])
        note = None if write is None else MaskNotes(tokenizer_of(run), ends_of(model.config), write)
        measured = measure_masked(model, masked_text, counts, rows, progress, note)
    unit, words = unit_of(data.corpus), ", whole words" if run.options.whole_words else ""
    metric = bits_per_masked(unit)
    text = [
        heading(subject, data.corpus, evaluation_settings.split),
        f"{measured.bits:.4f} {metric.unit}, {measured.accuracy:.1%} found: {measured.masked:,} masked in windows of "
        f"{plural(length, 'token')}{words}",
        f"{measured.unigram_bits:.4f} by their frequency in the training split",
        f"{measured.bigram_bits:.4f} by their frequency after the true {unit} before them",
    ]
    metrics = {metric: measured.bits, ACCURACY: measured.accuracy}
    baselines = {"unigram_bits": measured.unigram_bits, "bigram_bits": measured.bigram_bits}
    facts = baselines | {"masked": measured.masked} | asdict(run.options)
    facts |= {"length": length, "windows": measured.windows}
    if has_global_input(model):
        more_facts, more_text = _global_input(subject, masked_text, evaluation_settings, quiet)
        facts, text = facts | more_facts, text + more_text
    return evaluated(
        subject, metrics, data.identity, text, facts=facts, baselines=baselines, task="mlm", since=started_at
    )


def _global_input(
    subject: LoadedRun, text: MaskedText, evaluation_settings: EvaluationSettings, quiet: bool
) -> tuple[dict[str, object], list[str]]:
    """Return what the global input is worth, for JSON and as text."""
    training = subject.run.training
    rows = training.get("batch_size", max(1, evaluation_settings.chunk // text.length))
    with progressing(quiet) as progress:
        effect = measure_global_input(subject.model, text, rows, progress)
    lines = [f"{effect.zeroed:.4f} with the vectors of the global tokens zeroed, {effect.without:.4f} without these"]
    if training.get("objective") == "mlm-cpc":
        lines.append(
            f"{effect.accuracy:.1%} of {plural(effect.sentences, 'masked sentence')} identified by their global "
            f"tokens (by chance: {effect.chance:.1%})"
        )
    return {"global_input": asdict(effect)}, lines


@dataclass(frozen=True, kw_only=True)
class GlobalInputMeasurement:
    """What the global input of ETC (Ainslie et al. 2020) is worth, a token for each sentence before the long input.

    Bits of a masked token, the ``bits`` of the whole model beside those with the vectors of its global tokens
    ``zeroed`` and those ``without`` any.

    ``accuracy``: of ``sentences`` that were masked as a whole, the share whose global token was nearest to that of the
    sentence alone, among the sentences masked in the same rows; ``chance``: that share by guessing.
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


def measure_global_input(
    model: GlobalInputModel, text: MaskedText, rows: int, progress: ProgressCallback | None = None
) -> GlobalInputMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which come from all over it."""
    device, objective = device_of(model), MaskedLanguageCpc.of(model)
    totals: dict[str, float] = {}
    done = 0
    for shown in text.in_order(rows, shuffled=True):
        batch = map_fields(MaskedBatch.of(shown.rows), lambda field: field.to(device))
        none = torch.full_like(batch.tokens, -1)
        with torch.inference_mode():
            nats = {"": _nats(model, batch), "without_": _nats(model, batch, sentences=none)}
            nats["sentences_"] = objective(model, batch, None, 1.0)[1]
        with silenced(model), torch.inference_mode():
            nats["zeroed_"] = _nats(model, batch)
        for name, metrics in nats.items():
            for key, value in metrics.items():
                totals[name + key] = totals.get(name + key, 0.0) + float(value)
        require_finite(isfinite(sum(totals.values())))
        done += len(shown.rows.tokens)
        if progress is not None:
            progress(done, len(text))
    sentences = totals.get("sentences_cpc_predicted", 0.0)
    bits = [totals[f"{name}nats"] / log(2) / max(1.0, totals["predicted"]) for name in ("", "zeroed_", "without_")]
    return GlobalInputMeasurement(
        bits=bits[0],
        zeroed=bits[1],
        without=bits[2],
        sentences=int(sentences),
        accuracy=totals.get("sentences_cpc_correct", 0.0) / max(1.0, sentences),
        chance=totals.get("sentences_cpc_by_chance", 0.0) / max(1.0, sentences),
    )


@contextmanager
def silenced(model: GlobalInputModel) -> Iterator[None]:
    """Give the global tokens of ``model`` the vector 0 meanwhile."""
    weight: Tensor = part_of(model.global_input, "table").weight
    weight_before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.zero_()
        yield
    finally:
        with torch.no_grad():
            weight.copy_(weight_before)


def _nats(model: GlobalInputModel, batch: MaskedBatch, sentences: Tensor | None = None) -> dict[str, Tensor]:
    """Return the sums of masked language modelling over ``batch``: nats, tokens and how many are right."""
    return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid, sentences=sentences).long_input, batch)[1]
