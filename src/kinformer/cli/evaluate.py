"""``kinformer evaluate DIR...``: bits per byte of runs on held-out data, by one protocol for every member."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.cli.evaluate_lengths import Length, parse_lengths, possible
from kinformer.cli.evaluate_options import Options
from kinformer.cli.evaluate_report import Result, report
from kinformer.cli.options import require
from kinformer.cli.reading import check_positions, main_windows, opened, progressing, source
from kinformer.cli.store import check_store, looks_up, lookup_of, note_stored
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.cli.runs import HeldOut
    from kinformer.evaluation.bits import Measurement
    from kinformer.evaluation.windows import Windows
    from kinformer.family.runs import Run

NGRAM_CONTEXT = 4


def run(options: Options) -> int:
    """Measure and print."""
    _check(options)
    if options.datastore is not None and not _all_look_up(options):
        from kinformer.cli.evaluate_store import run as run_store

        return run_store(options)
    if _tells_no_next_token(options):
        from kinformer.cli.evaluate_tasks import run as run_tasks

        return run_tasks(options)
    lengths = parse_lengths(options.lengths)
    if options.recl:
        from kinformer.cli.evaluate_recl import run as run_recl

        return run_recl(options, lengths)
    with source(options) as data:
        results = [_measure(folder, data, options, lengths) for folder in options.folders]
    report(options, results)
    return 0


def _check(options: Options) -> None:
    require("--max-bytes", options.max_bytes, 2)
    require("--chunk", options.chunk, 1)
    if not options.folders:
        raise KinformerError("evaluate: needs DIR; see kinformer evaluate --help.")
    check_store(options)
    if options.plot is not None:
        from kinformer.evaluation.figure import check

        check(Path(options.plot))
        if options.lengths is None and not options.recl and options.datastore is None:
            raise KinformerError(f"--plot {options.plot}: draws what --lengths measures; give --lengths 1x,2x,4x too.")


def _all_look_up(options: Options) -> bool:
    from kinformer.family.runs import open_run

    return all(looks_up(open_run(folder).model) for folder in options.folders)


def _tells_no_next_token(options: Options) -> bool:
    from kinformer.cli.tasks import NEXT_TOKEN, task_of
    from kinformer.family.runs import open_run

    return any(task_of(open_run(folder)) != NEXT_TOKEN for folder in options.folders)


def _measure(folder: str, data: str | None, options: Options, lengths: Sequence[Length]) -> Result:
    from kinformer.evaluation.bits import measure
    from kinformer.evaluation.usage import noting_usage

    run, model = opened(folder, options)
    main = main_windows(run, model, options)
    within, skipped = possible([length.tokens(run) for length in lengths], model)
    further = [_windows(length, options.overlap) for length in within]
    beyond = [_windows(length, options.overlap) for length in skipped if not within]
    for windows in (main, *beyond):
        check_positions(model, windows)
    held = _held_out(options, run, data)
    lookup = lookup_of(model)
    if lookup is not None:
        note_stored(lookup.store, held, run.data.get("holdout") if options.holdout is None else options.holdout)
    done: dict[Windows | None, Measurement] = {}
    begun = time.perf_counter()
    with progressing(options.json) as progress:
        with noting_usage(model) as usages:
            done[main] = measure(model, held.split, main, chunk=options.chunk, progress=progress)
        seconds = time.perf_counter() - begun
        for windows in further:
            if windows not in done:
                done[windows] = measure(model, held.split, windows, chunk=options.chunk, progress=progress)
    ngram = _baseline(held) if options.baseline else None
    rest = [done[windows] for windows in further]
    return Result(run, held, done[main], rest, skipped, seconds, ngram, usages.read(), lookup)


def _windows(context: int, overlap: float) -> Windows:
    from kinformer.evaluation.windows import Windows

    return Windows(context=context, overlap=overlap)


def _held_out(options: Options, run: Run, data: str | None) -> HeldOut:
    from kinformer.cli.runs import held_out

    held = held_out(run, data, options.split, options.max_bytes, options.holdout)
    if held.note:
        print(f"kinformer: note: {held.note}", file=sys.stderr)
    return held


def _baseline(data: HeldOut) -> float:
    from kinformer.data import NgramModel

    return NgramModel(data.corpus.splits["train"], NGRAM_CONTEXT).bits_per_byte(data.split)
