"""BLEU and chrF of what a run translates, by sacrebleu, beside the untranslated source."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isfinite, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kinformer.core.model import device_of
from kinformer.data.pairs import Pairs, Parallel
from kinformer.data.token_batches import TokenBatches
from kinformer.evaluation.early_exit import LAYERS_PER_TOKEN, Exited, early_exit_stack, noting_exits, with_rule
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.progress import progressing
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, evaluated
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.text import ends_of, heading, identity_of_part
from kinformer.tasks.translate.generate import Translator
from kinformer.tasks.translate.held_out import held_out_pairs
from kinformer.tasks.translate.options import TranslateEvaluationOptions
from kinformer.tasks.translate.rows import EncodedPairs, TranslationLoss
from kinformer.training.batch import map_fields
from kinformer.training.metric import BITS_PER_BYTE, BLEU, CHRF

if TYPE_CHECKING:
    from kinformer.tasks.translate import Translate

EXAMPLES = 3


class Scores(NamedTuple):
    """Corpus BLEU and chrF of some translations, and sacrebleu's signatures, which say how they were computed."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def scores(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Compute BLEU and chrF with one reference a line by the package sacrebleu (Post 2018) and its defaults;
    KinformerError if it is not installed."""
    try:
        from sacrebleu.metrics import BLEU as Bleu  # noqa: N811
        from sacrebleu.metrics import CHRF as Chrf  # noqa: N811
    except ImportError:
        raise KinformerError(
            "BLEU and chrF need the package 'sacrebleu', which is not installed; run "
            "pip install 'kinformer[translate]'."
        ) from None
    bleu, chrf = Bleu(), Chrf()
    values = [metric.corpus_score(list(translations), [list(references)]).score for metric in (bleu, chrf)]
    return Scores(*values, *(str(metric.get_signature()) for metric in (bleu, chrf)))


def evaluate(
    task: Translate,
    subject: LoadedRun,
    evaluation_settings: EvaluationSettings,
    task_options: TranslateEvaluationOptions,
    quiet: bool,
) -> Evaluation:
    """Evaluate a run on held-out pairs: how well it predicts the references, and how like them its translations are."""
    data, pairs, same = held_out_pairs(task, subject.run, evaluation_settings)
    pairs = Pairs(pairs.source[: task_options.first], pairs.target[: task_options.first])
    scores([""], [""])  # before an hour's work
    started_at = time.perf_counter()
    bits = bits_per_byte(subject, data, pairs, evaluation_settings.chunk)
    with noting_exits(subject.model) as leaving:
        translations = translated(subject, pairs, task_options, quiet)
    seconds = time.perf_counter() - started_at
    references, sources = ([line.decode() for line in side] for side in (pairs.target, pairs.source))
    scored, copied = scores(translations, references), scores(sources, references)
    metrics = {BLEU: scored.bleu, CHRF: scored.chrf, BITS_PER_BYTE: bits}
    exits, beside, lines = beside_all_layers(subject, pairs, task_options, leaving.result, quiet)
    metrics |= {} if exits is None else {LAYERS_PER_TOKEN: exits.layers_per_token}
    identity = identity_of_part(data, evaluation_settings.split, same)
    baselines = {"copy_bleu": copied.bleu, "copy_chrf": copied.chrf}
    examples = [
        {"source": source, "translation": translation, "reference": reference}
        for source, translation, reference in zip(sources, translations, references, strict=True)
    ]
    task_options.write_predictions(examples)
    facts = baselines | beside | {
        "signatures": [scored.bleu_signature, scored.chrf_signature], "pairs": len(references),
        "beam": task_options.beam,
        "length_penalty": task_options.length_penalty, "examples": examples[:EXAMPLES], "seconds": seconds,
    }  # fmt: skip
    text = (
        heading(subject, data, evaluation_settings.split),
        f"BLEU {scored.bleu:.2f}, chrF2 {scored.chrf:.2f} of {plural(len(references), 'translation')} "
        f"({_search(task_options)}); the source as it is has BLEU {copied.bleu:.2f}, chrF2 {copied.chrf:.2f}",
        f"{bits:.4f} bits per byte of the references\n",
        *lines,
        *(
            line
            for example in examples[:EXAMPLES]
            for line in (*(f"{name:11}  {value}" for name, value in example.items()), "")
        ),
        f"BLEU  {scored.bleu_signature}\nchrF2 {scored.chrf_signature}",
    )
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task=task.name)


def beside_all_layers(
    subject: LoadedRun, pairs: Pairs, task_options: TranslateEvaluationOptions, exits: Exited | None, quiet: bool
) -> tuple[Exited | None, dict[str, object], tuple[str, ...]]:
    """Return what early exits save, the facts and the text of it beside the translations by all layers; nothing where
    no token could leave early."""
    if exits is None:
        return None, {}, ()
    translator = Translator(subject, task_options)
    early = early_exit_stack(subject.model)
    with with_rule(early, None):
        translations = translated(subject, pairs, task_options, quiet)
    references = [line.decode() for line in pairs.target]
    sources, written = (
        sum(len(ids) for ids in translator.tokenizer.encode_batch(side))
        for side in (pairs.source, [text.encode() for text in translations])
    )
    exits = translator.saved(exits, sources, written, len(references))
    all_layers = scores(translations, references)
    facts = {"exits": exits.facts, "all_layers_bleu": all_layers.bleu, "all_layers_chrf": all_layers.chrf}
    text = f"{exits.text}, which have BLEU {all_layers.bleu:.2f}, chrF2 {all_layers.chrf:.2f}\n"
    return exits, facts, (text,)


def _search(task_options: TranslateEvaluationOptions) -> str:
    if task_options.beam == 1:
        return "greedy"
    return f"beam {task_options.beam}, length penalty {task_options.length_penalty:g}"


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


def translated(subject: LoadedRun, pairs: Pairs, task_options: TranslateEvaluationOptions, quiet: bool) -> list[str]:
    """Return the translation of every source, in order; those of like length are translated together."""
    translator, result = Translator(subject, task_options), [""] * len(pairs.source)
    order = np.argsort([len(line) for line in pairs.source], kind="stable")
    with progressing(quiet, "translating") as progress:
        for first in range(0, len(order), task_options.batch_size):
            some = order[first : first + task_options.batch_size]
            for index, hypothesis in zip(some, translator([pairs.source[i] for i in some]), strict=True):
                result[index] = translator.text(hypothesis)
            if progress is not None:
                progress(first + len(some), len(order))
    return result
