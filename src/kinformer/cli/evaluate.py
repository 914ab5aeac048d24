"""``kinformer evaluate DIR...``: bits per byte of runs on held-out data, by one protocol for every member."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import tyro

from kinformer.cli.evaluate_lengths import Length, parse_lengths, possible
from kinformer.cli.evaluate_report import Result, report
from kinformer.cli.options import Changes, Computing, Count, Number, RunFolders, Text, require
from kinformer.cli.parsing import overrides
from kinformer.cli.store import MeasuredStoreOptions, check_store, equipped, looks_up, lookup_of, note_stored
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.cli.runs import HeldOut
    from kinformer.evaluation.bits import Measurement, Progress
    from kinformer.evaluation.windows import Windows
    from kinformer.family.runs import Run
    from kinformer.models.decoder import Decoder

NGRAM_CONTEXT = 4
CARRIED = "carried"
Context = Annotated[str | None, tyro.conf.arg(metavar="N|carried")]


@dataclass(frozen=True, kw_only=True)
class Options(MeasuredStoreOptions, Computing):
    """Measure runs: their files in order, every token scored once, in bits per byte of text."""

    folders: RunFolders
    """The run folder; several are measured one after the other and shown side by side."""
    set: Changes = ()
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    data: Text = None
    """Data to measure on: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "test"
    """Which part of the data: train, validation or test."""
    context: Context = None
    """Measure in windows of N tokens, or with the state carried from end to end. If not given, as it was trained:
    carried after training with --segments, else in windows of the training length."""
    overlap: float = 0.0
    """The share of each window that repeats the one before and is not scored again."""
    lengths: Text = None
    """Also measure in windows of each of these lengths and by position within them, as in 128,512,2048, or 1x,4x,16x
    for multiples of the training length. A length beyond a model's positions is left out."""
    plot: Text = None
    """Draw what --lengths, --recl or --datastore measured, as PNG or SVG by the ending of this name."""
    recl: bool = False
    """Measure the relative effective context length of a group of runs instead; --lengths are the contexts tried."""
    hardest: float = 0.1
    """With --recl: the share of tokens that count, those that the shorter context explains least."""
    positions: int = 512
    """With --recl: how many tokens are predicted, evenly spread, each anew at every context."""
    holdout: Number = None
    """Take the last share of the data for validation and test, instead of the run's."""
    max_bytes: Count = None
    """Measure on the first N bytes only."""
    chunk: int = 2048
    """Tokens computed at a time; bounds the memory, does not change the result."""
    baseline: bool = False
    """Also count 5-grams of the training split and measure their prediction."""


class Reading(Protocol):
    """What options say of how a text is read."""

    @property
    def data(self) -> str | None: ...
    @property
    def context(self) -> str | None: ...
    @property
    def overlap(self) -> float: ...
    @property
    def lengths(self) -> str | None: ...


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


def opened(folder: str, options: Options) -> tuple[Run, Decoder]:
    """A run and its model, ready to be measured."""
    from kinformer.family.runs import open_run
    from kinformer.training.precision import use_fast_products

    run = open_run(folder)
    use_fast_products()
    model = run.load(overrides(options.set)).to(options.prepare(options.seed))
    return run, equipped(run, model, options) if looks_up(run.model) else model


def _windows(context: int, overlap: float) -> Windows:
    from kinformer.evaluation.windows import Windows

    return Windows(context=context, overlap=overlap)


def main_windows(run: Run, model: Decoder, options: Reading) -> Windows | None:
    """The windows to measure in, as asked for or as the run was trained; None where the state is carried."""
    from kinformer.evaluation.bits import carries_for_ever

    asked = options.context
    endless = carries_for_ever(model)
    if asked == CARRIED and not endless:
        raise KinformerError(
            f"--context {CARRIED}: this model's state grows without bound, or its positions end; give --context N."
        )
    if asked == CARRIED or (asked is None and endless and run.training.get("segments")):
        if options.overlap and options.lengths is None:
            raise KinformerError(
                f"--overlap {options.overlap:g}: the state is carried here; give --context N or --lengths too."
            )
        return None
    if asked is not None:
        if not asked.isdigit():
            raise KinformerError(f"--context {asked}: is neither a number of tokens nor {CARRIED!r}.")
        return _windows(int(asked), options.overlap)
    length = run.training.get("length", model.max_length)
    if not isinstance(length, int):
        raise KinformerError(f"{run.folder}: does not say at what length it was trained; give --context N.")
    return _windows(length if model.max_length is None else min(length, model.max_length), options.overlap)


def check_positions(model: Decoder, windows: Windows | None) -> None:
    if windows is not None and model.max_length is not None and windows.context > model.max_length:
        raise KinformerError(
            f"a context of {windows.context} tokens is beyond this model's positions, which end at max_length = "
            f"{model.max_length}; give --context and --lengths no larger."
        )


@contextmanager
def source(options: Reading) -> Iterator[str | None]:
    """The data that was named, standard input as a file."""
    from kinformer.data import spool

    with tempfile.TemporaryDirectory() as folder:
        yield str(spool(sys.stdin.buffer, Path(folder))) if options.data == "-" else options.data


def _held_out(options: Options, run: Run, data: str | None) -> HeldOut:
    from kinformer.cli.runs import held_out

    held = held_out(run, data, options.split, options.max_bytes, options.holdout)
    if held.note:
        print(f"kinformer: note: {held.note}", file=sys.stderr)
    return held


@contextmanager
def progressing(quiet: bool, label: str = "measuring") -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _baseline(data: HeldOut) -> float:
    from kinformer.data import NgramModel

    return NgramModel(data.corpus.splits["train"], NGRAM_CONTEXT).bits_per_byte(data.split)
