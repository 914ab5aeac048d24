"""How well a model transcribes speech, beside writing nothing and writing the most frequent transcript."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, isfinite, log
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, WholeModel, device_of
from kinformer.data.clips import Holdout
from kinformer.data.phonemes import folded
from kinformer.data.sound import CHARACTERS, Sound, join_symbols, open_sound, split_symbols
from kinformer.evaluation.transcripts import Errors, count_errors
from kinformer.runtime.errors import KinformerError, choose, require_finite
from kinformer.runtime.progress import ProgressCallback, note, progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, TextTable, evaluated
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.text import heading, identity_of_part, note_other_data, spec_of
from kinformer.tasks.speech.decoding import decoder_of
from kinformer.tasks.speech.rows import Rows, ctc_nats
from kinformer.training.metric import BITS_PER_SYMBOL, ERROR_RATE

if TYPE_CHECKING:
    from kinformer.tasks.speech import Speech, SpeechEvaluationOptions

SHOWN = 8


def evaluate(
    task: Speech,
    subject: LoadedRun,
    evaluation_settings: EvaluationSettings,
    task_options: SpeechEvaluationOptions,
    quiet: bool,
) -> Evaluation:
    """Evaluate a run on held-out utterances, every one of them, however long or short."""
    run, model, prefixes = subject.run, subject.model, task_options.prefixes
    data = _data(subject, evaluation_settings)
    same = note_other_data(run, data, evaluation_settings.data is not None)
    rows = Rows(data, choose(evaluation_settings.split, data.splits, "`split`"), model.config)
    decode = decoder_of(subject, data.symbols, data.unit, prefixes, task_options)
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        heard, nats = _heard(model, rows, evaluation_settings.chunk, decode, progress)
    references = [split_symbols(rows.utterances.transcript(number), data.unit) for number in range(len(heard))]
    heard_symbols = [[data.symbols[symbol - 1] for symbol in item] for item in heard]
    if rows.short.any():
        note(f"note: {rows.left_out(evaluation_settings.split, rows.short)} and are left out of the bits per symbol.")
    frequent = _most_frequent(data)
    if task_options.fold is not None:
        references, heard_symbols, (frequent,) = (
            [_folded(item, data.unit) for item in some] for some in (references, heard_symbols, [frequent])
        )
    task_options.write_predictions(_rows(rows, references, heard_symbols))
    errors = count_errors(references, heard_symbols)
    possible = int(sum(len(rows.targets[number]) for number in rows.usable))
    bits = nats / log(2) / possible if possible else inf  # no path of so few positions gives a transcript
    metrics = {ERROR_RATE: errors.rate, BITS_PER_SYMBOL: bits}
    baselines = {"empty": 1.0, "most_frequent": count_errors(references, [frequent] * len(references)).rate}
    right = sum(a == b for a, b in zip(references, heard_symbols, strict=True))
    facts: dict[str, object] = errors._asdict() | {
        "utterances": len(references), "right": right, "prefixes": prefixes, "baselines": baselines, "unit": data.unit,
        "fold": task_options.fold,
        **{name: getattr(task_options, name) for name in ("language_model", "alpha", "beta") if task_options.name},
    }  # fmt: skip
    text: list[str | TextTable] = [
        heading(subject, data, evaluation_settings.split),
        _metrics(data.unit, errors, metrics[BITS_PER_SYMBOL], task_options),
        f"{right:,} of {plural(len(references), 'utterance')} without an error; writing nothing has an error rate of "
        f"100 %, always the most frequent transcript {baselines['most_frequent']:.1%}\n",
        _worst(rows, references, heard_symbols),
    ]
    if data.unit == CHARACTERS:
        words = _words(references, heard_symbols)
        facts["word_error_rate"] = words.rate
        text.insert(2, f"word error rate {words.rate:.2%} of {plural(words.symbols, 'word')}\n")
    identity = identity_of_part(data, evaluation_settings.split, same)
    return evaluated(
        subject, metrics, identity, text, facts=facts, baselines=baselines, task=task.name, since=started_at
    )


def _data(subject: LoadedRun, evaluation_settings: EvaluationSettings) -> Sound:
    """Return the data to measure on, with the symbols and the rate of the run's."""
    run = subject.run
    identity = run.data.get("identity") or {}
    symbols, rate = identity.get("symbols"), identity.get("rate")
    if not isinstance(symbols, list) or not isinstance(rate, int):
        raise KinformerError(f"{run.folder}: does not say which symbols it writes; measure the run that was trained.")
    spec = spec_of(run, evaluation_settings.data)
    options = run.options.reading(run.data.get("holdout"))
    options = replace(options, rate=None if spec == "dtmf" else rate, units=identity.get("unit"))
    if evaluation_settings.data is not None:  # what is held out of the run's own data says nothing of other
        options = replace(options, held=Holdout(share=run.data.get("holdout")))
    return open_sound(spec, options, symbols)


def _heard(
    model: CausalModel | WholeModel,
    rows: Rows,
    chunk: int,
    decode: Callable[[Tensor], list[int]],
    progress: ProgressCallback | None,
) -> tuple[list[list[int]], float]:
    """Return the classes that the model writes of every utterance, and the nats of all transcripts."""
    heard: list[list[int]] = [[] for _ in rows.positions]
    order, nats, begin, device = np.argsort(rows.positions, kind="stable"), 0.0, 0, device_of(model)
    with torch.inference_mode():
        while begin < len(order):
            widest = int(rows.positions[order[begin:]][0])
            end = begin + max(1, chunk // widest)
            batch = rows.batch(order[begin:end])
            outputs = model(batch.frames.to(device), valid=batch.valid.to(device))
            logits = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).float().cpu()
            lengths = batch.valid.sum(1)
            nats += float(ctc_nats(logits, lengths, batch.targets, batch.counts).double().sum())  # 0 of short ones
            require_finite(isfinite(nats))
            for number, row, length in zip(order[begin:end].tolist(), logits, lengths.tolist(), strict=True):
                heard[number] = decode(row[:length])
            begin = end
            if progress is not None:
                progress(min(begin, len(order)), len(order))
    return heard, nats


def _folded(phones: list[str], unit: str) -> list[str]:
    """Return the classes of the phones of a transcript."""
    if unit == CHARACTERS:
        raise KinformerError(
            "`fold` timit39: is for transcripts of phones with spaces between, but this run writes characters; train "
            "with `units` labels."
        )
    return folded(phones)


def _most_frequent(data: Sound) -> list[str]:
    """Return the most frequent transcript of training."""
    train = data.splits["train"]
    counts = Counter(train.transcript(number) for number in range(len(train.lengths)))
    return split_symbols(counts.most_common(1)[0][0], data.unit)


def _words(references: list[list[str]], heard: list[list[str]]) -> Errors:
    return count_errors(*([join_symbols(item, CHARACTERS).split() for item in some] for some in (references, heard)))


def _metrics(unit: str, errors: Errors, bits: float, options: SpeechEvaluationOptions) -> str:
    how = "greedy" if options.prefixes == 1 else plural(options.prefixes, "prefix") + options.name
    how += "" if options.fold is None else f"; folded to {options.fold}"
    kinds = f"{errors.substitutions} substituted, {errors.deletions} missing, {errors.insertions} too many"
    return (
        f"{unit.removesuffix('s')} error rate {errors.rate:.2%} ({how}; {kinds} of {errors.symbols:,}), "
        f"{bits:.4f} bits per symbol\n"
    )


def _rows(rows: Rows, references: list[list[str]], heard: list[list[str]]) -> Iterator[dict[str, object]]:
    """Yield a row of a table for every utterance: the right transcript, the model's, and the edits between them."""
    unit = rows.data.unit
    for number, (reference, item) in enumerate(zip(references, heard, strict=True)):
        texts = {"label": join_symbols(reference, unit), "text": join_symbols(item, unit)}
        yield {"audio": rows.utterances.name(number), **texts, "errors": count_errors([reference], [item]).edits}


def _worst(rows: Rows, references: list[list[str]], heard: list[list[str]]) -> TextTable:
    """Return the utterances with the most errors, the worst first."""
    edits = np.array([count_errors([a], [b]).edits for a, b in zip(references, heard, strict=True)])
    worst = [number for number in np.argsort(-edits, kind="stable")[:SHOWN].tolist() if edits[number]]
    unit = rows.data.unit
    lines = [
        [rows.utterances.name(number), join_symbols(references[number], unit), join_symbols(heard[number], unit)]
        for number in worst
    ]
    return TextTable(("utterance", "said", "heard"), lines)
