"""``kinformer evaluate DIR --datastore FOLDER``: a run with and without a datastore at its head (kNN-LM)."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.cli.output import print_json, print_table
from kinformer.cli.store import NEIGHBOURS, TEMPERATURE, WEIGHT, note_stored, searcher
from kinformer.core.errors import KinformerError
from kinformer.evaluation.mixing import WEIGHTS, Grid, Setting, Sweep, Watched, sweep

if TYPE_CHECKING:
    from kinformer.cli.evaluate_options import Options
    from kinformer.cli.runs import HeldOut
    from kinformer.data import Split
    from kinformer.evaluation.windows import Windows
    from kinformer.family.runs import Run
    from kinformer.memory.datastore import Datastore
    from kinformer.models.attached import AttachedDecoder

RECALLED = 256
EXACT_BELOW = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """With ``entries`` entries: the setting, what it was chosen on (None: it was given), and the reported figures."""

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
        """Bits per byte with another weight."""
        return self.sweep.bits_per_byte(
            Setting(weight=weight, temperature=self.setting.temperature, neighbours=self.setting.neighbours)
        )


@dataclass(frozen=True)
class _Job:
    """What one command measures with."""

    options: Options
    run: Run
    model: AttachedDecoder
    store: Datastore
    windows: Windows | None


def run(options: Options) -> int:
    """Measure and print."""
    from kinformer.cli.reading import check_positions, main_windows, opened, source
    from kinformer.cli.store import attach

    sizes = _sizes(options)
    run, model = opened(options.folders[0], options)
    attached = attach(run, model, options)
    windows = main_windows(run, model, options)
    check_positions(model, windows)
    job = _Job(options, run, attached, attached.head.searcher.store, windows)  # type: ignore[union-attr,arg-type]
    with source(options) as data:
        held = _held(job, data)
        tuning, reported = _parts(held, options)
        sizes = [size for size in sizes if size < job.store.entries]
        done = [_measure(job, tuning, reported, size) for size in (*sizes, job.store.entries)]
    _report(job, held, reported, done)
    return 0


def _sizes(options: Options) -> list[int]:
    """The numbers of entries that are tried too; raises for what does not go together with a datastore."""
    for flag, given in (("lengths", options.lengths), ("recl", options.recl), ("baseline", options.baseline)):
        if given:
            raise KinformerError(f"--{flag}: does not go together with --datastore; leave one out.")
    if len(options.folders) > 1:
        raise KinformerError("--datastore: belongs to one run; give one DIR.")
    parts = [] if options.sizes is None else [part.strip() for part in options.sizes.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise KinformerError(f"--sizes {options.sizes}: is not a list of numbers of entries; write as in 10000,100000.")
    return sorted({int(part) for part in parts})


def _held(job: _Job, data: str | None) -> HeldOut:
    """The text to measure on; a note tells where the store holds that very text."""
    from kinformer.cli.runs import held_out

    options = job.options
    held = held_out(job.run, data, options.split, options.max_bytes, options.holdout)
    holdout = job.run.data.get("holdout") if options.holdout is None else options.holdout
    note_stored(job.store, held, holdout)
    return held


def _parts(held: HeldOut, options: Options) -> tuple[Split | None, Split]:
    """What is tuned on, if asked for, and what is reported: never the same tokens."""
    from kinformer.cli.runs import first_bytes

    if not options.tune:
        return None, held.split
    splits = held.corpus.splits
    apart = splits["validation"].extents.pieces != splits["test"].extents.pieces
    if apart and held.split.name == "test" and len(splits["validation"]) > 1:
        tuning = splits["validation"]
        return tuning if options.max_bytes is None else first_bytes(tuning, options.max_bytes), held.split
    half = len(held.split) // 2
    tuning, reported = held.split.take(half), held.split.skip(half)
    for part in (tuning, reported):
        part.require(2, "tuning on one half and reporting the other")
    return tuning, reported


def _measure(job: _Job, tuning: Split | None, reported: Split, entries: int) -> Outcome:
    """Tune, if asked for, and measure with the first ``entries`` entries; few of them, which fill no list, exactly."""
    from kinformer.cli.reading import progressing
    from kinformer.memory.exact import ExactSearch

    options = job.options
    probes = None if entries < min(EXACT_BELOW, job.store.entries) else options.probes
    look_up: Any = searcher(job.store, probes, entries)
    most = NEIGHBOURS if options.neighbours is None else options.neighbours
    with progressing(options.json) as progress:
        if tuning is None:
            weight = WEIGHT if options.weight is None else options.weight
            temperature = TEMPERATURE if options.knn_temperature is None else options.knn_temperature
            setting = Setting(weight=weight, temperature=temperature, neighbours=most)
        else:
            grid = Grid.up_to(most)
            setting = sweep(job.model, look_up, tuning, job.windows, grid, chunk=options.chunk, progress=progress).best
        look_up = Watched(searcher(job.store, probes, entries), len(reported) // RECALLED)
        grid = Grid(tuple(sorted({*WEIGHTS, setting.weight})), (setting.temperature,), (setting.neighbours,))
        begun = time.perf_counter()
        swept = sweep(job.model, look_up, reported, job.windows, grid, chunk=options.chunk, progress=progress)
        seconds = time.perf_counter() - begun
    return Outcome(
        entries=entries,
        setting=setting,
        tuned_on=tuning,
        sweep=swept,
        bytes_read=look_up.bytes_read,
        recall=look_up.recall(ExactSearch(job.store, entries=entries)) if probes else None,
        recalled=look_up.queries,
        seconds=seconds,
    )


def _report(job: _Job, held: HeldOut, reported: Split, done: list[Outcome]) -> None:
    options, whole = job.options, done[-1]
    weights = [(weight, whole.at(weight)) for weight in whole.sweep.grid.weights]
    sizes = [(float(each.entries), each.bits) for each in done] if len(done) > 1 else []
    if options.json:
        print_json(_told(job, held, reported, done) | {"weights": [list(point) for point in weights]})
    else:
        _print(job, held, reported, done)
    if options.plot is not None:
        from kinformer.evaluation.plot_store import plot

        plot(whole.at(0.0), weights, sizes, Path(options.plot))
        print(f"kinformer: drew {options.plot}", file=sys.stderr)


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {"entries": outcome.entries} | asdict(outcome.setting) | {
        "bits_per_byte": outcome.bits,
        "bits_per_byte_alone": outcome.at(0.0),
        "bytes_read_per_query": outcome.bytes_read / outcome.sweep.tokens,
        "recall": outcome.recall,
        "recall_queries": outcome.recalled if outcome.recall is not None else None,
        "seconds": outcome.seconds,
    }  # fmt: skip


def _told(job: _Job, held: HeldOut, reported: Split, done: list[Outcome]) -> dict[str, Any]:
    whole, tuned = done[-1], done[-1].tuned_on
    return (
        {"run": str(job.run.folder), "member": job.run.member, "datastore": str(job.store.folder)}
        | {"data": held.identity, "bytes": reported.bytes, "tokens": whole.sweep.tokens}
        | {"context": None if job.windows is None else job.windows.context, "carried": job.windows is None}
        | {"tuned_on": None if tuned is None else {"split": tuned.name, "bytes": tuned.bytes}}
        | {"approximate": job.options.probes is not None, "probes": job.options.probes}
        | _figures(whole)
        | {"sizes": [_figures(each) for each in done]}
    )


def _print(job: _Job, held: HeldOut, reported: Split, done: list[Outcome]) -> None:
    whole, setting = done[-1], done[-1].setting
    print(f"{job.run.folder} ({job.run.member}) on {held.corpus.name} {held.corpus.version}, {reported.name} split")
    print(f"datastore {job.store.folder}: {job.store.entries:,} entries of {job.store.dim} numbers")
    if whole.tuned_on is not None:
        same = "first half of the " if whole.tuned_on.name == reported.name else ""
        rest = ", the figures are of its second half" if same else ""
        print(f"tuned on the {same}{whole.tuned_on.name} split ({whole.tuned_on.bytes:,} bytes){rest}")
    print(
        f"{whole.bits:.4f} bits per byte with weight {setting.weight:g}, temperature {setting.temperature:g}, "
        f"{setting.neighbours} neighbours; {whole.at(0.0):.4f} with weight 0, which is the model alone"
    )
    way = "exact search"
    if whole.recall is not None:
        way = f"{job.options.probes} probes, recall@{setting.neighbours} {whole.recall:.3f} of {whole.recalled} queries"
    print(
        f"{reported.bytes:,} bytes, {whole.sweep.tokens:,} predictions, {way}, "
        f"{whole.bytes_read / whole.sweep.tokens:,.0f} bytes read per query, "
        f"{reported.bytes / whole.seconds:,.0f} bytes/s"
    )
    print()
    rows = [(f"{weight:g}", f"{whole.at(weight):.4f}") for weight in whole.sweep.grid.weights]
    print_table(("weight", "bits per byte"), rows, numbers=(0, 1))
    if len(done) > 1:
        print()
        sizes = [
            (f"{each.entries:,}", f"{each.setting.weight:g}", f"{each.setting.temperature:g}", f"{each.bits:.4f}")
            for each in done
        ]
        print_table(("entries", "weight", "temperature", "bits per byte"), sizes, numbers=range(4))
