"""The evaluation of a run with and without a datastore at its head (kNN-LM), at many weights and with fewer entries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.lab.data import Split, first_bytes
from kinformer.lab.datastore.attach import (
    EXACT_BELOW,
    attach_mixture,
    looks_up,
    mixture_of,
    note_stored,
    searcher,
)
from kinformer.lab.datastore.keys import StoredRun
from kinformer.lab.datastore.search import probes_of
from kinformer.lab.datastore.store import Datastore
from kinformer.lab.evaluation.bits import Windows
from kinformer.lab.evaluation.mixing import WEIGHTS, Grid, Setting, Sweep, Watched, sweep
from kinformer.lab.tasks.evaluation import EvaluationReport, LoadedRun, TextTable, evaluated
from kinformer.lab.tasks.texts import HeldOut, check_positions, held_out, main_windows
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError, marked, plural
from kinformer.runtime.parsing import parse_counts
from kinformer.runtime.progress import note, progressing

if TYPE_CHECKING:
    from kinformer.lab.datastore.attach import AttachedDecoder
    from kinformer.lab.runs.options import EvaluateOptions

RECALLED = 256
BITS = Metric("bits_per_byte", "bits per byte")


@dataclass(frozen=True, kw_only=True)
class StoreMeasurement:
    """The metrics with ``entries`` entries, and the setting with the split that it was tuned on (None: a given one)."""

    entries: int
    setting: Setting
    tuned_on: Split | None
    sweep: Sweep
    bytes_read: int
    recall: float | None
    recalled: int
    seconds: float

    @property
    def bits(self) -> float:
        return self.sweep.bits_per_byte(self.setting)

    def at(self, weight: float) -> float:
        """Return bits per byte with another weight."""
        return self.sweep.bits_per_byte(self.setting._replace(weight=weight))


def evaluate_datastore(
    runs: Sequence[StoredRun], options: EvaluateOptions, task_options: Any, quiet: bool
) -> EvaluationReport | None:
    """Evaluate a run with and without the datastore that ``options`` mix into its predictions, None without one;
    ``task_options`` are its task's evaluation options."""
    if options.datastore is None or all(looks_up(run.config) for run in runs):
        return None
    sizes = _sizes(runs, options, task_options)
    run = runs[0]
    model = run.model(options.set).to(options.prepare(options.seed))
    attached = attach_mixture(run, model, options)
    if task_options.plot is not None:
        from kinformer.lab.drawing.plots import check

        check(Path(task_options.plot))
    windows = main_windows(run, model, task_options.context, task_options.overlap)
    check_positions(model, windows)
    store: Datastore = attached.head.searcher.store  # type: ignore[union-attr,assignment]
    probes = probes_of(store.folder, options.probes)
    held = held_out(run, options, task_options.holdout)
    tuning, reported = _parts(held, options)
    measured = [held.split] if tuning is None or tuning.name == held.split.name else [tuning, reported]
    note_stored(store.record, run, held.data, options.data, measured)
    further = (size for size in sizes if size < store.entries)
    done = [
        _measure(attached, options, windows, probes, tuning, reported, size, quiet)
        for size in (*further, store.entries)
    ]
    whole = done[-1]
    weights = [(weight, whole.at(weight)) for weight in whole.sweep.grid.weights]
    if task_options.plot is not None:
        from kinformer.lab.drawing.plots import plot_datastore as draw

        curve = [(float(item.entries), item.bits) for item in done] if len(done) > 1 else []
        draw(whole.at(0.0), weights, curve, Path(task_options.plot))
        note(f"drew {task_options.plot}")
    facts = (
        {"datastore": str(store.folder)}
        | {"bytes": reported.bytes, "tokens": whole.sweep.tokens}
        | {"context": None if windows is None else windows.context, "carried": windows is None}
        | {"tuned_on": None if tuning is None else {"split": tuning.name, "bytes": tuning.bytes}}
        | {"approximate": probes is not None, "probes": probes}
        | _metrics(whole)
        | {"sizes": [_metrics(item) for item in done], "weights": [list(point) for point in weights]}
    )
    loaded, blocks = LoadedRun(run, None), _blocks(run, store, probes, held, reported, done)
    alone = {"bits_per_byte_alone": whole.at(0.0)}
    return EvaluationReport(
        [evaluated(loaded, {BITS: whole.bits}, held.identity, blocks, facts=facts, baselines=alone)]
    )


def _sizes(runs: Sequence[StoredRun], options: EvaluateOptions, task_options: object) -> list[int]:
    """Return the further numbers of entries to measure; raise for options that conflict with a datastore."""
    for flag in ("contexts", "recl", "baseline"):
        if getattr(task_options, flag, None):
            raise KinformerError(f"{marked(flag)}: does not go together with `datastore`; leave one out.")
    if len(runs) > 1:
        raise KinformerError("`datastore`: belongs to one run; give one DIR.")
    try:
        return [] if options.sizes is None else parse_counts(options.sizes)
    except ValueError:
        raise KinformerError(f"`sizes` {options.sizes}: is not a list of sizes; write as in 10k,100k.") from None


def _parts(held: HeldOut, options: EvaluateOptions) -> tuple[Split | None, Split]:
    """Return the split to tune on, if any, and the split to report. They never share tokens."""
    if not options.tune:
        return None, held.split
    splits = held.data.splits
    disjoint = splits["validation"].extents.pieces != splits["test"].extents.pieces
    if disjoint and held.split.name == "test" and len(splits["validation"]) > 1:
        tuning = splits["validation"]
        if options.first is not None:
            tuning = first_bytes(tuning, options.first, held.data.tokenizer)
        return tuning, held.split
    half = len(held.split) // 2
    tuning, reported = held.split.take(half), held.split.skip(half)
    for part in (tuning, reported):
        part.require(2, "tuning on one half and reporting the other")
    return tuning, reported


def _measure(
    model: AttachedDecoder,
    options: EvaluateOptions,
    windows: Windows | None,
    probes: int | None,
    tuning: Split | None,
    reported: Split,
    entries: int,
    quiet: bool,
) -> StoreMeasurement:
    """Tune, if requested, and measure with the first ``entries`` entries; few are searched exactly, not in lists."""
    store: Datastore = model.head.searcher.store  # type: ignore[union-attr,assignment]
    setting = Setting(**mixture_of(options))
    probes = None if entries < min(EXACT_BELOW, store.entries) else probes
    with progressing(quiet) as progress:
        measure = partial(sweep, model, windows=windows, chunk=options.chunk, progress=progress)
        if tuning is not None:
            setting = measure(searcher(store, probes, entries), tuning, grid=Grid.up_to(setting.neighbours)).best
        watched = Watched(searcher(store, probes, entries), len(reported) // RECALLED)
        grid = Grid(tuple(sorted({*WEIGHTS, setting.weight})), (setting.temperature,), (setting.neighbours,))
        started_at = time.perf_counter()
        swept = measure(watched, reported, grid=grid)
        seconds = time.perf_counter() - started_at
    return StoreMeasurement(
        entries=entries,
        setting=setting,
        tuned_on=tuning,
        sweep=swept,
        bytes_read=watched.bytes_read,
        recall=watched.recall(searcher(store, None, entries)) if probes else None,
        recalled=watched.queries,
        seconds=seconds,
    )


def _metrics(outcome: StoreMeasurement) -> dict[str, object]:
    return {"entries": outcome.entries} | outcome.setting._asdict() | {
        "bits_per_byte": outcome.bits,
        "bits_per_byte_alone": outcome.at(0.0),
        "bytes_read_per_query": outcome.bytes_read / outcome.sweep.tokens,
        "recall": outcome.recall,
        "recall_queries": outcome.recalled if outcome.recall is not None else None,
        "seconds": outcome.seconds,
    }  # fmt: skip


def _blocks(
    run: StoredRun,
    store: Datastore,
    probes: int | None,
    held: HeldOut,
    reported: Split,
    done: Sequence[StoreMeasurement],
) -> list[str | TextTable]:
    whole, setting = done[-1], done[-1].setting
    blocks: list[str | TextTable] = [
        f"{run.folder} ({run.member}) on {held.data.name} {held.data.version}, {reported.name} split",
        f"datastore {store.folder}: {plural(store.entries, 'entry')} of {plural(store.dim, 'number')}",
    ]
    if whole.tuned_on is not None:
        same = "first half of the " if whole.tuned_on.name == reported.name else ""
        rest = ", the figures are of its second half" if same else ""
        blocks.append(f"tuned on the {same}{whole.tuned_on.name} split ({plural(whole.tuned_on.bytes, 'byte')}){rest}")
    way = "exact search"
    if whole.recall is not None and probes is not None:
        recalled = f"recall@{setting.neighbours} {whole.recall:.3f} of {plural(whole.recalled, 'query')}"
        way = f"{plural(probes, 'probe')}, {recalled}"
    blocks += [
        f"{whole.bits:.4f} bits per byte with weight {setting.weight:g}, temperature {setting.temperature:g}, "
        f"{plural(setting.neighbours, 'neighbour')}; {whole.at(0.0):.4f} with weight 0, which is the model alone",
        f"{plural(reported.bytes, 'byte')}, {plural(whole.sweep.tokens, 'prediction')}, {way}, "
        f"{whole.bytes_read / whole.sweep.tokens:,.0f} bytes read per query, {reported.bytes / whole.seconds:,.0f} "
        "bytes/s\n",
    ]
    rows = [(f"{weight:g}", f"{whole.at(weight):.4f}") for weight in whole.sweep.grid.weights]
    blocks.append(TextTable(("weight", "bits per byte"), rows, (0, 1)))
    if len(done) > 1:
        sizes = [
            (f"{item.entries:,}", f"{item.setting.weight:g}", f"{item.setting.temperature:g}", f"{item.bits:.4f}")
            for item in done
        ]
        blocks += ["", TextTable(("entries", "weight", "temperature", "bits per byte"), sizes, range(4))]
    return blocks
