"""What ``kinformer evaluate`` tells of the runs that it measured: text, tables, JSON, a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.cli.evaluate_lengths import trained_at
from kinformer.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kinformer.cli.evaluate_options import Options
    from kinformer.cli.runs import HeldOut
    from kinformer.cli.store import Lookup
    from kinformer.evaluation.bits import Measurement
    from kinformer.evaluation.plot_lengths import Curve
    from kinformer.evaluation.usage import Usage
    from kinformer.family.runs import Run


@dataclass(frozen=True)
class Result:
    """Of one run: ``first`` as it was trained, ``rest`` at further lengths, ``skipped`` those beyond its positions,
    ``usage`` of its memories in the first, ``lookup`` what its head looks things up in."""

    run: Run
    data: HeldOut
    first: Measurement
    rest: list[Measurement]
    skipped: list[int]
    seconds: float
    ngram: float | None
    usage: tuple[Usage, ...] = ()
    lookup: Lookup | None = None


def report(options: Options, results: Sequence[Result]) -> None:
    """Print the results, as JSON if asked for, and draw them if asked for."""
    names = short_names([result.run.folder for result in results])
    if options.json:
        told = [_told(options, result) for result in results]
        print_json(told[0] if len(told) == 1 else {"runs": told})
    else:
        for result in results:
            _print_first(options, result)
        measured = [[result.first, *result.rest] for result in results]
        if any(result.rest or result.skipped for result in results):
            _print_lengths(names, measured, [result.skipped for result in results])
            for name, each in zip(names, measured, strict=True):
                _print_positions(name if len(names) > 1 else "", each)
    if options.plot is not None:
        from kinformer.evaluation.plot_lengths import plot

        curves = zip(names, results, strict=True)
        plot([_curve(name, each.run, [each.first, *each.rest]) for name, each in curves], Path(options.plot))
        print(f"kinformer: drew {options.plot}", file=sys.stderr)


def _print_first(options: Options, result: Result) -> None:
    run, data, first = result.run, result.data, result.first
    model = ", ".join((run.member, *options.set))
    print(f"{run.folder} ({model}) on {data.corpus.name} {data.corpus.version}, {data.split.name} split")
    print(
        f"{first.bits_per_byte:.4f} bits per byte: {first.bytes:,} bytes, {first.tokens:,} predictions, "
        f"{_way(first)}, {first.bytes / result.seconds:,.0f} bytes/s"
    )
    if result.lookup is not None:
        store, count = result.lookup
        print(f"{count} neighbours of each token among the {store.entries:,} entries of {store.folder}")
    for usage in result.usage:
        print(f"{usage.used:.1%} of the {usage.values:,} values of {usage.part} used, KL {usage.kl:.3f} from even use")
    if result.ngram is not None:
        print(f"{result.ngram:.4f} bits per byte by a 5-gram model of the training split")
    if result.skipped:
        lengths = ", ".join(map(str, result.skipped))
        print(f"kinformer: note: {run.folder}: not measured at {lengths}, beyond its positions.", file=sys.stderr)


def _way(measured: Measurement) -> str:
    if measured.context is None:
        return "state carried"
    repeated = f", {measured.overlap:.0%} of each repeated" if measured.overlap else ""
    return f"windows of {measured.context} tokens{repeated}"


def _told(options: Options, result: Result) -> dict[str, Any]:
    """For JSON."""
    run, first = result.run, result.first
    return (
        {"run": str(run.folder), "member": run.member, "set": list(options.set), "data": result.data.identity}
        | _figures(first)
        | {"bytes": first.bytes, "seconds": result.seconds, "bytes_per_second": first.bytes / result.seconds}
        | {"lengths": [_figures(each) for each in result.rest], "not_possible": result.skipped}
        | {"ngram_bits_per_byte": result.ngram}
        | ({} if result.lookup is None else result.lookup.facts())
        | ({"memory": [asdict(usage) for usage in result.usage]} if result.usage else {})
    )


def _figures(measured: Measurement) -> dict[str, Any]:
    return {
        "context": measured.context,
        "carried": measured.context is None,
        "overlap": measured.overlap,
        "tokens": measured.tokens,
        "bits_per_byte": measured.bits_per_byte,
        "bits_per_token": measured.bits_per_token,
        "by_position": [each._asdict() for each in measured.by_position],
    }


def _print_lengths(
    names: Sequence[str], results: Sequence[Sequence[Measurement]], skipped: Sequence[Sequence[int]]
) -> None:
    """Bits per byte, a row per length and a column per run; "-" where a model's positions do not reach."""
    columns = [{each.context: f"{each.bits_per_byte:.4f}" for each in result} for result in results]
    contexts = dict.fromkeys(context for column in columns for context in column)
    beyond = sorted({length for lengths in skipped for length in lengths if length not in contexts})
    rows = [
        [context or "carried", *(column.get(context, "-") for column in columns)] for context in (*contexts, *beyond)
    ]
    headers = ("context", *(["bits per byte"] if len(names) == 1 else names))
    print()
    print_table(headers, rows, numbers=range(len(headers)))


def _print_positions(name: str, results: Sequence[Measurement]) -> None:
    """Bits per byte by how many tokens of its window a token had before it, a column per length."""
    results = list({each.context: each for each in results if each.by_position}.values())
    columns = [{each.last: each for each in result.by_position} for result in results]
    bins = {last: each for column in columns for last, each in column.items()}
    rows = [
        [
            f"{bins[last].first}-{last}" if last > 1 and bins[last].first < last else str(last),
            *(f"{column[last].bits_per_byte:.4f}" if last in column else "" for column in columns),
        ]
        for last in sorted(bins)
    ]
    print(f"\nbits per byte by position in the window{name and f', {name}'}")
    headers = ("tokens before", *(f"of {each.context}" for each in results))
    print_table(headers, rows, numbers=range(len(headers)))


def _curve(name: str, run: Run, results: Sequence[Measurement]) -> Curve:
    """What is drawn of one run: every length, and the positions within the longest."""
    from kinformer.evaluation.plot_lengths import Curve

    windowed = sorted((each for each in results if each.context is not None), key=lambda each: each.context or 0)
    return Curve(
        name=name,
        trained=trained_at(run),
        lengths=tuple((each.context or 0, each.bits_per_byte) for each in windowed),
        positions=tuple((each.last, each.bits_per_byte) for each in windowed[-1].by_position),
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names where these tell them apart, else their paths."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
