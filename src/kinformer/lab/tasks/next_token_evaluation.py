"""Runs on held-out text: bits per byte at the trained length and at other lengths, in one table side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kinformer.core.model import CausalModel
from kinformer.generation.generate import generate
from kinformer.lab.calibration.options import CalibrateOptions
from kinformer.lab.calibration.risk import Samples, at_threshold
from kinformer.lab.data import NgramModel
from kinformer.lab.evaluation.bits import Measurement, Windows, measure
from kinformer.lab.evaluation.depths import (
    LAYERS_PER_TOKEN,
    PONDER_STEPS,
    Exited,
    early_exit_stack,
    noting_exits,
    noting_steps,
    saved,
    with_rule,
)
from kinformer.lab.evaluation.recl import check, context_losses, recl, spread_positions
from kinformer.lab.evaluation.usage import record_usage
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationReport,
    EvaluationSettings,
    LoadedRun,
    TextTable,
    TrainedRun,
    evaluated,
    parts_of,
)
from kinformer.lab.tasks.next_token import NGRAM_CONTEXT
from kinformer.lab.tasks.options import NextTokenEvaluationOptions
from kinformer.lab.tasks.task import Load
from kinformer.lab.tasks.texts import (
    check_positions,
    held_out,
    lengths_in,
    main_windows,
    short_names,
    tell_untrained,
    tokenizer_of,
    trained_at,
)
from kinformer.lab.training.logging import BITS_PER_BYTE, Metric
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.progress import note, progressing

# How much earlier text each run of a group makes use of (``lab.evaluation.recl``).

STEPS = 8
RECL = Metric("recl", "tokens", lower_is_better=False)


def evaluate_recl(
    runs: Sequence[TrainedRun],
    load: Load,
    settings: EvaluationSettings,
    options: NextTokenEvaluationOptions,
    contexts: Sequence[int],
    quiet: bool,
) -> EvaluationReport:
    """Measure the group at every context."""
    check(contexts, options.hardest)
    first = runs[0]
    for other in runs[1:]:
        if tokenizer_of(other).fingerprint != tokenizer_of(first).fingerprint:
            raise KinformerError(
                f"`recl` compares losses token by token, but {other.folder} and {first.folder} have different "
                "tokenizers; measure them separately."
            )
    held = held_out(first, settings, options.holdout)
    positions = spread_positions(held.split, contexts[-1], options.positions)
    losses_of = partial(context_losses, split=held.split, contexts=contexts, positions=positions, chunk=settings.chunk)
    nats = []
    for run in runs:
        with progressing(quiet) as progress:
            nats.append(losses_of(load(run).model, progress=progress, prefix=tokenizer_of(run).prefix))
    losses = np.stack(nats)
    curves = recl(losses, contexts, hardest=options.hardest)
    names = short_names([run.folder for run in runs])
    if options.plot is not None:
        from kinformer.lab.drawing.plots import plot_effective_context

        plot_effective_context(names, contexts, curves, Path(options.plot))
        note(f"drew {options.plot}")
    evaluations = []
    for run, curve, loss in zip(runs, curves, losses, strict=True):
        facts = {"at_least": curve.at_least, "gains": list(curve.gains), "mean_nats": loss.mean(axis=1).tolist()}
        evaluations.append(evaluated(LoadedRun(run, None), {RECL: curve.length}, held.identity, (), facts=facts))
    about = {"data": held.identity, "contexts": contexts, "tokens": losses.shape[2], "hardest": options.hardest}
    by_run = {"runs": [evaluation.facts for evaluation in evaluations]}
    title = (
        f"relative effective context length on {held.data.name} {held.data.version}, {held.split.name} split: "
        f"the hardest {options.hardest:.0%} of {losses.shape[2]} tokens\n"
    )
    headers = ("run", "RECL", *(f"{one} to {two}" for one, two in zip(contexts, contexts[1:])))
    rows = [
        [name, f"{'at least ' if item.at_least else ''}{item.length}", *(f"{gain:.1%}" for gain in item.gains)]
        for name, item in zip(names, curves, strict=True)
    ]
    table = TextTable(headers, rows, range(1, len(headers)))
    return EvaluationReport(evaluations, [title, table], about | by_run)


def contexts_of(first: TrainedRun, text: str | None) -> list[int]:
    """Return the contexts in tokens: as in ``text``, or eight equal steps up to twice ``first``'s training length."""
    if lengths := lengths_in(text, first):
        return sorted(set(lengths))
    trained = trained_at(first)
    if trained is None:
        raise KinformerError(f"{first.folder}: does not say its training length; give `contexts` 64,128,192,256.")
    return sorted({max(1, 2 * trained * step // STEPS) for step in range(1, STEPS + 1)})


PROMPT_TOKENS, NEW_TOKENS = 64, 32


class TextSamples(Samples):
    """Samples of running text for a calibration of early exits: prompts, and their greedy continuations.
    The prompts are evenly drawn from a text; the truth is the text after the prompt."""

    def __init__(self, run: TrainedRun, model: CausalModel, options: CalibrateOptions) -> None:
        if options.beam is not None:
            raise KinformerError(
                f"`beam` {options.beam}: is of translations; a text is continued greedily here, so leave it out."
            )
        held = held_out(run, EvaluationSettings(data=options.data, split=options.split))
        self.prompt_tokens, self.new_tokens = options.prompt_tokens or PROMPT_TOKENS, options.new_tokens or NEW_TOKENS
        super().__init__(model, held.identity, {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens})
        split, length = held.split, self.prompt_tokens + self.new_tokens
        if len(split) < length + options.prompts:
            raise KinformerError(
                f"split {split.name!r} of {split.corpus} holds {plural(len(split), 'token')}, too few for "
                f"{options.prompts} samples of {length}; give more data, or fewer by `prompts`, `prompt_tokens` or "
                "`new_tokens`."
            )
        draw = np.random.default_rng(options.seed)
        starts = np.sort(draw.choice(len(split) - length, options.prompts, replace=False))
        rows = split.rows(starts, length)
        self.prompts, self.truth = rows[:, : self.prompt_tokens], rows[:, self.prompt_tokens :]
        self.batch_size = options.batch_size
        self.begin()

    def write(self) -> np.ndarray:
        settings: dict[str, Any] = {"max_new_tokens": self.new_tokens, "temperature": 0.0, "seed": 0}
        parts = (torch.from_numpy(self.prompts[part]) for part in parts_of(len(self.prompts), self.batch_size))
        return torch.cat([generate(self.model, some, **settings).cpu() for some in parts]).numpy()

    def saved(self, threshold: float) -> Exited:
        with at_threshold(self.model, threshold):
            return saved(self.model, self.exits[threshold], self.prompt_tokens)


class Measured(NamedTuple):
    """The measurements of one run: the ``evaluation`` as trained, all ``measurements``, the first as trained and the
    others at further lengths, and ``skipped``, the lengths beyond the run's positions."""

    run: TrainedRun
    evaluation: Evaluation
    measurements: Sequence[Measurement]
    skipped: Sequence[int]


def evaluate(
    runs: Sequence[TrainedRun],
    load: Load,
    settings: EvaluationSettings,
    options: NextTokenEvaluationOptions,
    quiet: bool,
) -> EvaluationReport:
    """Evaluate runs in windows or with carried state, at further lengths, or by their effective context.

    ``options`` says which."""
    if options.plot is not None:
        from kinformer.lab.drawing.plots import check

        check(Path(options.plot))
        if options.contexts is None and not options.recl:
            raise KinformerError(f"`plot` {options.plot}: draws what `contexts` measures; add `contexts` 1x,2x,4x.")
    if options.recl:
        return evaluate_recl(runs, load, settings, options, contexts_of(runs[0], options.contexts), quiet)
    lengths = [lengths_in(options.contexts, run) for run in runs]
    results = [_measure(load(run), settings, options, some, quiet) for run, some in zip(runs, lengths, strict=True)]
    names = short_names([run.folder for run in runs])
    if options.plot is not None:
        _plot(names, results, Path(options.plot))
    together: list[str | TextTable] = []  # the lengths of all runs in one table, and the positions of each
    if any(result.measurements[1:] or result.skipped for result in results):
        together += ["", _by_length(names, results)]
        for name, result in zip(names, results, strict=True):
            where = f", {name}" if len(names) > 1 else ""
            together += [f"\nbits per byte by position in the window{where}", _by_position(result)]
    return EvaluationReport([result.evaluation for result in results], together)


def _measure(
    subject: LoadedRun,
    settings: EvaluationSettings,
    options: NextTokenEvaluationOptions,
    lengths: Sequence[int],
    quiet: bool,
) -> Measured:
    run, model = subject.run, subject.model
    beside = options.contexts is not None
    main = main_windows(run, model, options.context, options.overlap, beside_lengths=beside)
    limit = model.max_length
    within = [length for length in lengths if limit is None or length <= limit]
    skipped = [length for length in lengths if length not in within]
    further = [Windows(context=length, overlap=options.overlap) for length in within]
    beyond = [Windows(context=length, overlap=options.overlap) for length in skipped if not within]
    for windows in (main, *beyond):
        check_positions(model, windows)
    tell_untrained(run, (main.context if main else None) or 0)
    held = held_out(run, settings, options.holdout)
    done: dict[Windows | None, Measurement] = {}
    measured_by = partial(measure, model, held.split, chunk=settings.chunk, prefix=tokenizer_of(run).prefix)
    started_at = time.perf_counter()
    with progressing(quiet) as progress:
        with record_usage(model) as usages, noting_steps(model) as ponder_recorder, noting_exits(model) as leaving:
            done[main] = measured_by(main, progress=progress)
        seconds = time.perf_counter() - started_at
        exits, all_layers = leaving.result, None
        if exits is not None:
            started_at = time.perf_counter()
            with with_rule(early_exit_stack(model), None):
                all_layers = measured_by(main)
            past = (main.context if main else settings.chunk) // 2
            exits = replace(saved(model, exits, past), speedup=(time.perf_counter() - started_at) / seconds)
        for windows in further:
            if windows not in done:
                done[windows] = measured_by(windows, progress=progress)
    if skipped:
        note(f"note: {run.folder}: not measured at {', '.join(map(str, skipped))}, beyond its positions.")
    first, rest, usage = done[main], [done[windows] for windows in further], usages.read()
    metrics, lookup = {BITS_PER_BYTE: first.bits_per_byte}, subject.lookup or {}
    baselines: dict[str, float] = {}
    facts = (
        _facts_of_run(first)
        | {"bytes": first.bytes, "seconds": seconds, "bytes_per_second": first.bytes / seconds}
        | {"lengths": [_facts_of_run(item) for item in rest], "not_possible": skipped, "ngram_bits_per_byte": None}
        | dict(lookup)
        | ({"memory": [asdict(item) for item in usage]} if usage else {})
    )
    way = "state carried" if first.context is None else f"windows of {plural(first.context, 'token')}"
    way += f", {first.overlap:.0%} of each repeated" if first.context is not None and first.overlap else ""
    lines = [
        f"{first.bits_per_byte:.4f} bits per byte: {plural(first.bytes, 'byte')}, "
        f"{plural(first.tokens, 'prediction')}, {way}, {first.bytes / seconds:,.0f} bytes/s"
    ]
    if lookup:
        lines.append(
            f"{plural(lookup['neighbours'], 'neighbour')} of each token among the "
            f"{plural(lookup['entries'], 'entry')} of {lookup['datastore']}"
        )
    lines += [
        f"{item.used:.1%} of the {plural(item.values, 'value')} of {item.part} used, KL {item.kl:.3f} from even use"
        for item in usage
    ]
    if (steps := ponder_recorder.mean) is not None:
        metrics[PONDER_STEPS] = steps
        lines.append(PONDER_STEPS.text(steps))
    if exits is not None and all_layers is not None:
        metrics[LAYERS_PER_TOKEN] = exits.layers_per_token
        facts |= {"exits": exits.facts, "all_layers_bits_per_byte": all_layers.bits_per_byte}
        lines.append(f"{exits.text}, which have {all_layers.bits_per_byte:.4f} bits per byte")
    if options.baseline:
        counted = NgramModel(held.data.splits["train"], NGRAM_CONTEXT).bits_per_byte(held.split)
        facts["ngram_bits_per_byte"] = baselines["ngram_bits_per_byte"] = counted
        lines.append(f"{counted:.4f} bits per byte by a 5-gram model of the training split")
    evaluation = held.report(subject, metrics, lines, facts=facts, baselines=baselines)
    return Measured(run, evaluation, [first, *rest], skipped)


def _facts_of_run(measured: Measurement) -> dict[str, object]:
    values = {name: getattr(measured, name) for name in ("overlap", "tokens", "bits_per_byte", "bits_per_token")}
    by_position = [item._asdict() for item in measured.by_position]
    return {"context": measured.context, "carried": measured.context is None, **values, "by_position": by_position}


def _by_length(names: Sequence[str], results: Sequence[Measured]) -> TextTable:
    """Return bits per byte, a row per length and a column per run; "-" beyond a model's positions."""
    columns = [{item.context: f"{item.bits_per_byte:.4f}" for item in result.measurements} for result in results]
    contexts = dict.fromkeys(context for column in columns for context in column)
    beyond = sorted({length for result in results for length in result.skipped if length not in contexts})
    order = (*contexts, *beyond)
    rows = [[context or "carried", *(column.get(context, "-") for column in columns)] for context in order]
    headers = ("context", *(["bits per byte"] if len(names) == 1 else names))
    return TextTable(headers, rows, range(len(headers)))


def _by_position(result: Measured) -> TextTable:
    """Return bits per byte by how many tokens of its window a token had before it, a column per length."""
    measured = list({item.context: item for item in result.measurements if item.by_position}.values())
    columns = [{item.last: item for item in one.by_position} for one in measured]
    bins = {last: value for column in columns for last, value in column.items()}
    rows = []
    for last in sorted(bins):
        span = f"{bins[last].first}-{last}" if last > 1 and bins[last].first < last else str(last)
        rows.append([span, *(f"{column[last].bits_per_byte:.4f}" if last in column else "" for column in columns)])
    headers = ("tokens before", *(f"of {item.context}" for item in measured))
    return TextTable(headers, rows, range(len(headers)))


def _plot(names: Sequence[str], results: Sequence[Measured], path: Path) -> None:
    """Draw every length, and the positions within the longest, of every run."""
    from kinformer.lab.drawing.plots import Curve, plot_lengths

    curves = []
    for name, result in zip(names, results, strict=True):
        windowed = {item.context: item for item in result.measurements if item.context is not None}
        lengths = tuple((context, item.bits_per_byte) for context, item in sorted(windowed.items()))
        longest = windowed[max(windowed)].by_position
        positions = tuple((item.last, item.bits_per_byte) for item in longest)
        curves.append(Curve(name=name, trained=trained_at(result.run), lengths=lengths, positions=positions))
    plot_lengths(curves, path)
    note(f"drew {path}")
