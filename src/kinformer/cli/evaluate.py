"""``kinformer evaluate DIR``: bits per byte of a run on held-out data, by one protocol for every member."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kinformer.cli.options import Computing, Count, RunFolder, Text, require
from kinformer.cli.output import print_json, print_table
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
class Options(Computing):
    """Measure a run: its files in order, every token scored once, in bits per byte of text."""

    folder: RunFolder
    """The run folder."""
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
    """Also measure in windows of each of these lengths, as in 128,512,2048."""
    max_bytes: Count = None
    """Measure on the first N bytes only."""
    chunk: int = 2048
    """Tokens computed at a time; bounds the memory, does not change the result."""
    baseline: bool = False
    """Also count 5-grams of the training split and measure their prediction."""


def run(options: Options) -> int:
    """Measure and print."""
    from kinformer.evaluation.bits import measure
    from kinformer.family.runs import open_run
    from kinformer.training.precision import use_fast_products

    require("--max-bytes", options.max_bytes, 2)
    require("--chunk", options.chunk, 1)
    further = [_windows(length, options.overlap) for length in _lengths(options.lengths)]
    run = open_run(options.folder)
    use_fast_products()
    model = run.load().to(options.prepare(options.seed))
    main = _main_windows(run, model, options)
    with _data(options, run) as data:
        for other in (main, *further):
            _check_positions(model, other)
        if data.note:
            print(f"kinformer: note: {data.note}", file=sys.stderr)
        begun = time.perf_counter()
        with _progress(options.json) as progress:
            first = measure(model, data.split, main, chunk=options.chunk, progress=progress)
            seconds = time.perf_counter() - begun
            rest = [measure(model, data.split, other, chunk=options.chunk, progress=progress) for other in further]
        ngram = _baseline(data) if options.baseline else None
    _print(options, run, data, (first, rest, seconds, ngram))
    return 0


def _windows(context: int, overlap: float) -> Windows:
    from kinformer.evaluation.windows import Windows

    return Windows(context=context, overlap=overlap)


def _lengths(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise KinformerError(f"--lengths {text}: is not a list of whole numbers; write as in 128,512,2048.") from None


def _main_windows(run: Run, model: Decoder, options: Options) -> Windows | None:
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


def _check_positions(model: Decoder, windows: Windows | None) -> None:
    if windows is not None and model.max_length is not None and windows.context > model.max_length:
        raise KinformerError(
            f"a context of {windows.context} tokens is beyond this model's positions, which end at max_length = "
            f"{model.max_length}; give --context and --lengths no larger."
        )


@contextmanager
def _data(options: Options, run: Run) -> Iterator[HeldOut]:
    from kinformer.cli.runs import held_out
    from kinformer.data import spool

    with tempfile.TemporaryDirectory() as folder:
        piped = options.data == "-"
        data = str(spool(sys.stdin.buffer, Path(folder))) if piped else options.data
        yield held_out(run, data, options.split, options.max_bytes)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _baseline(data: HeldOut) -> float:
    from kinformer.data import NgramModel

    return NgramModel(data.corpus.splits["train"], NGRAM_CONTEXT).bits_per_byte(data.split)


def _print(
    options: Options, run: Run, data: HeldOut, results: tuple[Measurement, list[Measurement], float, float | None]
) -> None:
    first, rest, seconds, ngram = results
    if options.json:
        print_json(
            {"run": str(run.folder), "member": run.member, "data": data.identity}
            | _figures(first)
            | {"bytes": first.bytes, "seconds": seconds, "bytes_per_second": first.bytes / seconds}
            | {"lengths": [_figures(each) for each in rest], "ngram_bits_per_byte": ngram}
        )
        return
    print(f"{run.folder} ({run.member}) on {data.corpus.name} {data.corpus.version}, {data.split.name} split")
    print(
        f"{first.bits_per_byte:.4f} bits per byte: {first.bytes:,} bytes, {first.tokens:,} predictions, "
        f"{_told(first)}, {first.bytes / seconds:,.0f} bytes/s"
    )
    if ngram is not None:
        print(f"{ngram:.4f} bits per byte by a 5-gram model of the training split")
    if rest:
        print()
        rows = [(each.context or "carried", f"{each.bits_per_byte:.4f}") for each in (first, *rest)]
        print_table(("context", "bits per byte"), rows, numbers=(0, 1))


def _told(measured: Measurement) -> str:
    if measured.context is None:
        return "state carried"
    repeated = f", {measured.overlap:.0%} of each repeated" if measured.overlap else ""
    return f"windows of {measured.context} tokens{repeated}"


def _figures(measured: Measurement) -> dict[str, Any]:
    return {
        "context": measured.context,
        "carried": measured.context is None,
        "overlap": measured.overlap,
        "tokens": measured.tokens,
        "bits_per_byte": measured.bits_per_byte,
        "bits_per_token": measured.bits_per_token,
    }
