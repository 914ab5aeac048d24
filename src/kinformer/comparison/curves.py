"""The charts of a comparison and the labels of their points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean

from kinformer.comparison import measures, words
from kinformer.comparison.charts import Chart, Series
from kinformer.comparison.record import Comparison, EntrantRecord, Point, mean_of
from kinformer.comparison.results import PositionBits
from kinformer.runtime.words import plural
from kinformer.training.metric import size


def charts(comparison: Comparison) -> list[tuple[str, list[Chart]]]:
    """Return sections of charts by title; charts without data are left out."""
    index = {entrant.name: number for number, entrant in enumerate(comparison.entrants)}
    sections = [
        ("Learning", _learning(comparison, index)),
        ("Quality against its costs", _costs(comparison, index)),
        ("Position and longer contexts", _contexts(comparison, index)),
        ("Time and memory against length", _lengths(comparison, index)),
        ("The sweep of learning rates", _sweep(comparison, index)),
    ]
    return [
        (title, charts_with_data)
        for title, section in sections
        if (charts_with_data := [entrant for entrant in section if entrant.series])
    ]


def _learning(comparison: Comparison, index: dict[str, int]) -> Iterator[Chart]:
    per_step = comparison.budget["tokens_step"]
    axes: list[tuple[str, str, Callable[[Point], float | None], str, str]] = [
        ("steps", "steps", lambda point: float(point.step), "{:,.0f} steps", ""),
        ("tokens", "tokens", lambda point: float(point.step * per_step), "{:,.0f} tokens", ""),
        ("seconds", "seconds of training", lambda point: point.seconds, "{:,.1f} s", ""),
        ("flops", "FLOPs", lambda point: point.flops, "{:.3g} FLOPs", "x"),
    ]
    note = "Validation; the mean over the seeds where they were measured at the same steps."
    for key, title, of, form, log in axes:
        series = []
        for entrant in comparison.finished:
            points = [
                (x, y, f"{form.format(x)}, {words.shown(comparison.deciding, y)}")
                for x, y in _mean_curve(entrant, of)
                if x is not None and x > 0
            ]
            if len(points) > 1:
                series.append(Series(entrant.name, index[entrant.name], points))
        yield Chart(f"by-{key}", f"Against {title}", title, words.unit_of(comparison.deciding), series, log, note=note)


def _mean_curve(entrant: EntrantRecord, of: Callable[[Point], float | None]) -> Iterator[tuple[float | None, float]]:
    runs = entrant.runs
    if any([point.step for point in run.curve] != [point.step for point in runs[0].curve] for run in runs):
        runs = runs[:1]
    for points in zip(*(run.curve for run in runs), strict=True):
        xs = [of(point) for point in points]
        yield (None if None in xs else mean(xs)), mean(point.value for point in points)  # type: ignore[type-var]


def _costs(comparison: Comparison, index: dict[str, int]) -> Iterator[Chart]:
    length, unit = measures.common_length(comparison), words.unit_of(comparison.deciding)
    costs: list[tuple[str, str, str, Callable[[EntrantRecord], float | None], Callable[[float], str]]] = [
        (
            "state",
            "State",
            f"bytes of state after {plural(length, 'token')}",
            lambda entrant: measures.state_at(entrant, length),
            size,
        ),
        ("time", "Training time", "seconds of training", _seconds, lambda x: f"{x:,.0f} s"),
        ("memory", "Memory", "peak bytes in training", measures.peak_bytes, size),
        (
            "speed",
            "Generation",
            "tokens/s, one text",
            lambda entrant: measures.generated(entrant, 1),
            lambda x: f"{x:,.0f}/s",
        ),
    ]
    for key, title, x_title, of, text in costs:
        corner = "lower" if comparison.lower_is_better else "upper", "right" if key == "speed" else "left"
        note = f"{' '.join(corner).capitalize()} is better."
        series = [
            Series(
                entrant.name,
                index[entrant.name],
                [(x, mean_of(entrant), f"{text(x)}, {words.shown(comparison.deciding, mean_of(entrant))}")],
            )
            for entrant in comparison.finished
            if (x := of(entrant)) is not None
        ]
        yield Chart(f"quality-{key}", title, x_title, f"{unit}, test", series, "x", joined=False, note=note)


def _seconds(entrant: EntrantRecord) -> float:
    return mean(run.seconds for run in entrant.runs)


def _contexts(comparison: Comparison, index: dict[str, int]) -> Iterator[Chart]:
    metric, positions, lengths = comparison.deciding, [], []
    unit = words.unit_of(metric)
    for entrant in comparison.finished:
        rows = [row for row in entrant.runs[0].contexts if row.get("context")]
        points = [
            (row["context"], row["value"], f"{plural(row['context'], 'token')}, {words.shown(metric, row['value'])}")
            for row in sorted(rows, key=lambda row: row["context"])
        ]
        if len(points) > 1:
            lengths.append(Series(entrant.name, index[entrant.name], points))
        longest = max((row for row in rows if row["positions"]), key=lambda row: row["context"], default=None)
        if longest is not None:
            inside = [(last, value, f"{first:,} to {plural(last, 'token')} before, {words.shown(metric, value)}")
                      for first, last, value in map(_bin, longest["positions"])]  # fmt: skip
            positions.append(Series(entrant.name, index[entrant.name], inside))
    note = "First seed; tokens that a prediction had before it in its window, of the longest context measured."
    yield Chart("positions", "By position", "tokens before", unit, positions, "x", note=note)
    note = "First seed; each length measured in windows of its own."
    yield Chart("contexts", "By length of context", "tokens of context", unit, lengths, "x", note=note)


def _bin(contexts: PositionBits) -> tuple[int, int, float]:
    return contexts["first"], contexts["last"], contexts["bits_per_byte"]


def _lengths(comparison: Comparison, index: dict[str, int]) -> Iterator[Chart]:
    def series(points_of: Callable[[EntrantRecord], Iterator[tuple[float, float, str]]]) -> list[Series]:
        points = {entrant.name: list(points_of(entrant)) for entrant in comparison.entrants}
        return [Series(name, index[name], items) for name, items in points.items() if items]

    for kind, title in (("step", "A training step"), ("forward", "A forward")):
        curves = series(partial(_times, kind))
        yield Chart(f"length-{kind}", title, "tokens of one row", "milliseconds", curves, "xy")
    note = (
        "The highest moment of a training step of one row, above the model itself, in a process of its own; on a CPU, "
        f"what is below {size(measures.RESOLUTION)} cannot be resolved and is not drawn."
    )
    yield Chart("length-memory", "Memory of a step", "tokens of one row", "MiB", series(_memory), "xy", note=note)
    yield Chart("state", "The state of one row", "tokens absorbed", "KiB", series(_states), "xy")


def _times(kind: str, entrant: EntrantRecord) -> Iterator[tuple[float, float, str]]:
    if entrant.lengths:
        for length, seconds in sorted(words.seconds_of(entrant, kind).items()):
            yield length, 1000 * seconds, f"{plural(length, 'token')}, {1000 * seconds:,.1f} ms"


def _memory(entrant: EntrantRecord) -> Iterator[tuple[float, float, str]]:
    for row in entrant.memory["lengths"] if entrant.memory else ():
        if row["bytes"] >= measures.resolution(entrant):
            yield row["length"], row["bytes"] / 2**20, f"{plural(row['length'], 'token')}, {size(row['bytes'])}"


def _states(entrant: EntrantRecord) -> Iterator[tuple[float, float, str]]:
    for length, count in sorted((int(length), count) for length, count in (entrant.state_bytes or {}).items()):
        if count:
            yield length, count / 1024, f"{plural(length, 'token')}, {size(count)}"


def _sweep(comparison: Comparison, index: dict[str, int]) -> Iterator[Chart]:
    metric = comparison.deciding
    series = []
    for entrant in comparison.entrants:
        points = [
            (trial.lr, trial.value, f"learning rate {trial.lr:g}, {words.shown(metric, trial.value)}")
            for trial in entrant.sweep
            if trial.value is not None
        ]
        if points:
            series.append(Series(entrant.name, index[entrant.name], points))
    note = "Validation after short runs with the first seed; what diverged is not shown."
    yield Chart("sweep", "Learning rates", "learning rate", words.unit_of(comparison.deciding), series, "x", note=note)
