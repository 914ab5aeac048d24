"""The report of a comparison, in any form: columns, order, title and conditions; and all of it as Markdown."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from kinformer.lab.comparison import words
from kinformer.lab.comparison import words as measures
from kinformer.lab.comparison.record import Badge, Comparison, EntrantRecord, MachineFacts, Point, PositionBits, mean_of
from kinformer.lab.comparison.speed import described
from kinformer.lab.comparison.words import (
    RESOLUTION,
    Measure,
    common_length,
    departures,
    generated,
    peak_bytes,
    resolution,
    state_at,
    welch,
)
from kinformer.lab.drawing.style import figure
from kinformer.lab.drawing.text import SEEN, TextPicture
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import plural

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Curves as SVG made by matplotlib, in the page's colours, with a label at every point.


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
INK, QUIET, FAINT, NOTHING = "#010101", "#020202", "#030303", "#ffffff"
COLOURS = 8
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES = ("-", "--", "-.", ":")
WIDTH, HEIGHT, MAX_POINTS = 5.4, 3.3, 60


@dataclass(frozen=True)
class Series:
    """A curve: its ``name``, its ``index`` among the entrants (which gives colour, marker and dashes) and its points
    (x, y, label)."""

    name: str
    index: int
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Chart:
    """Series over common axes. ``joined``: lines between the points; ``log`` names the logarithmic axes."""

    key: str
    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: str = ""
    joined: bool = True
    note: str = ""

    @property
    def description(self) -> str:
        """Describe the chart in words for readers who cannot see it."""
        return (
            f"{self.title}: {self.y} against {self.x}, {plural(len(self.series), 'curve')}; the numbers are in the "
            "table below."
        )


def colour(index: int) -> str:
    """Return the page's colour of an entrant."""
    return f"var(--s{index % COLOURS})"


def shape_of(index: int) -> str:
    """Return an entrant's marker; entrants of one colour have different ones."""
    return MARKERS[(index + index // COLOURS) % len(MARKERS)]


def svg(chart: Chart) -> str:
    """Return the chart as an SVG element for HTML. Its colours are CSS variables (``--s0`` and on, ``--ink``,
    ``--muted``, ``--line``); every point carries ``data-tip`` and ``data-series``."""
    series = [Series(entry.name, entry.index, _thinned(_drawable(entry.points, chart.log))) for entry in chart.series]
    with figure(WIDTH, HEIGHT) as drawn:
        axes = drawn.add_axes((0.13, 0.17, 0.84, 0.77))
        for number, item in enumerate(series):
            (line,) = axes.plot(
                [point[0] for point in item.points],
                [point[1] for point in item.points],
                color=_placeholder(item.index),
                marker=shape_of(item.index),
                markersize=5 if chart.joined else 9,
                linewidth=1.6,
                clip_on=False,
                linestyle=DASHES[item.index // COLOURS % len(DASHES)] if chart.joined else "none",
            )
            line.set_gid(f"series-{number}")
        _dress(axes, chart)
        text = _as_text(drawn)
    return _adapted(text, chart, series)


def _dress(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in chart.log:
            getattr(axes, f"set_{name}scale")("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
            axis.set_minor_locator(NullLocator())
        if name == "x" or name in chart.log:
            axis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(chart.x, color=INK, parse_math=False)
    axes.set_ylabel(chart.y, color=INK, parse_math=False)
    axes.tick_params(which="both", colors=QUIET, labelcolor=INK, labelsize=8.5)
    axes.grid(True, color=FAINT, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(QUIET)
    axes.set_facecolor("none")
    axes.figure.set_facecolor("none")


def _as_text(drawn: Figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    settings: Any = {
        "svg.fonttype": "none",
        "path.simplify": False,
        "svg.hashsalt": "kinformer",
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(settings):
        drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue()


def _adapted(text: str, chart: Chart, series: Sequence[Series]) -> str:
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(text[text.index("<svg") :])
    for unwanted in ("metadata", "style"):
        for parent in list(root.iter()):
            for child in [item for item in parent if item.tag == f"{{{SVG}}}{unwanted}"]:
                parent.remove(child)
    for number, line in enumerate(series):
        group = root.find(f".//{{{SVG}}}g[@id='series-{number}']")
        assert group is not None
        group.set("data-series", str(line.index))
        marks = list(group.iter(f"{{{SVG}}}use"))
        for mark, point in zip(marks, line.points, strict=True):
            mark.set("class", "pt")
            mark.set("data-series", str(line.index))
            mark.set("data-tip", f"{line.name}: {point[2]}")
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.set("role", "presentation")
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    out = ElementTree.tostring(root, encoding="unicode")
    out = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.key}-", out)
    colours = {INK: "var(--ink)", QUIET: "var(--muted)", FAINT: "var(--line)"}
    colours |= {_placeholder(index): colour(index) for index in range(COLOURS)}
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: colours.get(match[0], match[0]), out)


def _placeholder(index: int) -> str:
    """Return a colour that stands for an entrant's until it is replaced by the page's."""
    return f"#0a0b{0x10 + index % COLOURS:02x}"


def _drawable(points: Sequence[tuple[float, float, str]], log: str) -> Sequence[tuple[float, float, str]]:
    """Return the points that have a place on the axes: finite ones, above 0 where an axis is logarithmic."""
    return [
        point
        for point in points
        if all(isfinite(value) and (axis not in log or value > 0) for axis, value in zip("xy", point[:2], strict=True))
    ]


def _thinned(points: Sequence[tuple[float, float, str]]) -> Sequence[tuple[float, float, str]]:
    """Return at most ``MAX_POINTS`` of the points, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


def marker(index: int) -> str:
    """Return an entrant's marker for a legend, as SVG."""
    shapes = {
        "o": '<circle cx="8" cy="8" r="5"/>',
        "s": '<rect x="3.5" y="3.5" width="9" height="9"/>',
        "^": '<path d="M8 2.5 13.5 13h-11z"/>',
        "D": '<path d="M8 2 14 8 8 14 2 8z"/>',
        "v": '<path d="M8 13.5 2.5 3h11z"/>',
        "P": '<path d="M6 2h4v4h4v4h-4v4H6v-4H2V6h4z"/>',
        "X": '<path d="m3 5 2-2 3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3z"/>',
        "p": '<path d="m8 2 6 4.5-2.3 7H4.3L2 6.5z"/>',
    }
    shape = shapes[shape_of(index)]
    return f'<svg class="key" viewBox="0 0 16 16" aria-hidden="true" style="fill: {colour(index)}">{shape}</svg>'


# The charts of a comparison and the labels of their points.


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
    length, unit = common_length(comparison), words.unit_of(comparison.deciding)
    costs: list[tuple[str, str, str, Callable[[EntrantRecord], float | None], Callable[[float], str]]] = [
        (
            "state",
            "State",
            f"bytes of state after {plural(length, 'token')}",
            lambda entrant: state_at(entrant, length),
            size,
        ),
        ("time", "Training time", "seconds of training", _seconds, lambda x: f"{x:,.0f} s"),
        ("memory", "Memory", "peak bytes in training", peak_bytes, size),
        (
            "speed",
            "Generation",
            "tokens/s, one text",
            lambda entrant: generated(entrant, 1),
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
        f"what is below {size(RESOLUTION)} cannot be resolved and is not drawn."
    )
    yield Chart("length-memory", "Memory of a step", "tokens of one row", "MiB", series(_memory), "xy", note=note)
    yield Chart("state", "The state of one row", "tokens absorbed", "KiB", series(_states), "xy")


def _times(kind: str, entrant: EntrantRecord) -> Iterator[tuple[float, float, str]]:
    if entrant.lengths:
        for length, seconds in sorted(words.seconds_of(entrant, kind).items()):
            yield length, 1000 * seconds, f"{plural(length, 'token')}, {1000 * seconds:,.1f} ms"


def _memory(entrant: EntrantRecord) -> Iterator[tuple[float, float, str]]:
    for row in entrant.memory["lengths"] if entrant.memory else ():
        if row["bytes"] >= resolution(entrant):
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


def columns(comparison: Comparison) -> list[Measure]:
    """Return the columns of the table of results; a column without any value is left out."""
    metric, finished = comparison.deciding, bool(comparison.finished)
    apart = {item.name: item for item in words.differences(comparison)} if finished else {}

    def p(entrant: EntrantRecord) -> float | None:
        return apart[entrant.name].together if entrant.name in apart else None

    table = [
        Measure(
            words.unit_of(metric),
            lambda item: mean_of(item) if item.runs else None,
            lambda value: words.shown(metric, value),
            metric.lower_is_better,
        ),
        Measure("± seeds", words.spread, lambda value: words.shown(metric, value)),
        Measure("p against the best", p, lambda value: f"{value:.3f}"),
        Measure("parameters", lambda item: item.parameters or None, lambda value: f"{value:,}"),
        Measure("learning rate", lambda item: item.lr, lambda value: f"{value:g}"),
        *measures.costs(comparison),
    ]
    return [measure for measure in table if any(measure.value(item) is not None for item in comparison.entrants)]


def ordered(comparison: Comparison) -> list[EntrantRecord]:
    """Return the entrants, the best first, those that are out last."""
    return [*comparison.finished, *(entrant for entrant in comparison.entrants if not entrant.runs)]


def markdown(comparison: Comparison) -> str:
    """Return the comparison as a page of Markdown."""
    shown = columns(comparison)
    sentences = [*words.summary(comparison), *words.crossovers_of(comparison)]
    lines = [f"# {_prose(title(comparison))}", "", *(f"- {_prose(item)}" for item in sentences), ""]
    lines += [
        "| member | " + " | ".join(_prose(column.title) for column in shown) + " |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for entrant in ordered(comparison):
        lines.append(
            f"| {_prose(entrant.name)} | " + " | ".join(_prose(column.cell(entrant)) for column in shown) + " |"
        )
    lines += ["", *(f"- {_prose(item)}" for item in measures.departures(comparison))]
    lines += ["", _prose(conditions(comparison)), "", "    " + _line(comparison.command), ""]
    for entrant in comparison.entrants:
        if entrant.runs:
            lines += [f"{_prose(entrant.name)} alone:", "", "    " + _line(entrant.runs[0].command), ""]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Return ``text``, which may hold others' names, so that Markdown shows it as it is: no HTML, links or marks."""
    marked = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", _line(text))
    plain = escape(marked, quote=False).replace("://", "&#58;//").replace("@", "&#64;").replace("www.", "www&#46;")
    return re.sub(r"^(\d*)([-+.)]) ", r"\1\\\2 ", plain)


def _line(text: str) -> str:
    """Return ``text`` in one line, as it may stand in a block of code."""
    return " ".join(text.split())


def title(comparison: Comparison) -> str:
    """Return the report's heading: how many members, the task and the data."""
    data = comparison.data.get("name", "") if isinstance(comparison.data, dict) else ""
    return f"{plural(len(comparison.entrants), 'member')} on {comparison.task}{f', {data}' if data else ''}"


def conditions(comparison: Comparison) -> str:
    """Return the budget, data, machine and versions in one paragraph."""
    budget, data = comparison.budget, comparison.data if isinstance(comparison.data, dict) else {}
    steps = budget.get("steps") or []
    made = (
        plural(steps[0], "step")
        if len(steps) == 1
        else f"{min(steps):,} to {max(steps):,} steps"
        if steps
        else "no step"
    )
    where = next((entrant.machine for entrant in comparison.entrants if entrant.machine), MachineFacts())
    limit = data.get("max_bytes")
    first = f", its first {plural(limit, 'byte')}" if limit else ""
    return (
        f"{plural(budget['parameters'], 'parameter')} within 5 %, {made} of {plural(budget['tokens_step'], 'token')}, "
        f"{plural(budget['seeds'], 'seed')}; the same data in the same order, the same recipe, the learning rate of "
        f"each by a sweep. Data: {data.get('name', '?')} {data.get('version', '')}, {data.get('split', '')} "
        f"split{first}. kinformer {comparison.kinformer}, torch {(where.get('versions') or {}).get('torch')}, Python "
        f"{where.get('python')}, on {described(where)}; {comparison.created}."
    )


# A comparison as one HTML page that holds all that it needs: style, script, charts, data.

ASSETS = Path(__file__).parent / "assets"
SIGNS = {True: ("holds", "✓", "holds"), False: ("fails", "✗", "fails"), None: ("open", "?", "not judged")}


def page(comparison: Comparison) -> str:
    """Return the page. All text of the comparison, which may be of others, is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    loader = FileSystemLoader(ASSETS)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    index = {entrant.name: number for number, entrant in enumerate(comparison.entrants)}
    sections = [
        {
            "title": heading,
            "words": list(words.crossovers_of(comparison)) if "length" in heading and "Time" in heading else [],
            "charts": [_chart_facts(drawn, Markup(svg(drawn))) for drawn in chart],
        }
        for heading, chart in charts(comparison)
    ]
    keys = {name: Markup(marker(number)) for name, number in index.items()}
    return environment.get_template("page.html").render(
        title=title(comparison),
        conditions=conditions(comparison),
        summary=words.summary(comparison),
        columns=columns(comparison),
        rows=_rows(comparison, index, keys),
        departures=departures(comparison),
        pairs=_pairs(comparison),
        baselines=", ".join(
            f"{name.replace('_', ' ')} {words.shown(comparison.deciding, value)}"
            for name, value in (comparison.baselines or {}).items()
        ),
        sections=sections,
        sheets=[
            _sheet(
                entrant,
                index[entrant.name],
                keys[entrant.name],
                [Markup(_picture(p["rows"])) for p in _patterns(entrant)],
            )
            for entrant in ordered(comparison)
        ],
        command=comparison.command,
        machine=_json([{entrant.name: entrant.machine} for entrant in comparison.entrants][:1] + [comparison.seconds]),
        style=Markup((ASSETS / "style.css").read_text(encoding="utf-8")),
        script=Markup((ASSETS / "script.js").read_text(encoding="utf-8")),
    )


def _rows(comparison: Comparison, index: dict[str, int], keys: dict[str, Markup]) -> list[dict[str, object]]:
    shown = columns(comparison)
    best: list[float | None] = []
    for column in shown:
        values = [value for entrant in comparison.entrants if (value := column.value(entrant)) is not None]
        best.append((min if column.less else max)(values) if column.less is not None and values else None)
    return [
        {
            "name": entrant.name,
            "index": index[entrant.name],
            "key": keys[entrant.name],
            "shown": bool(entrant.runs or entrant.lengths),
            "cells": [
                {
                    "text": column.cell(entrant),
                    "value": "" if (value := column.value(entrant)) is None else repr(value),
                    "best": value is not None and value == top,
                }
                for column, top in zip(shown, best, strict=True)
            ],
        }
        for entrant in ordered(comparison)
    ]


def _pairs(comparison: Comparison) -> dict[str, object] | None:
    repeated = [entrant for entrant in comparison.finished if len(entrant.runs) > 1]
    if len(repeated) < 2:
        return None
    rows = []
    for one in repeated:
        tests = [None if other is one else welch(one.values, other.values) for other in repeated]
        rows.append((one.name, ["" if test is None else f"{test.p:.3f}" for test in tests]))
    return {"names": [entrant.name for entrant in repeated], "rows": rows}


def _chart_facts(chart: Chart, picture: object) -> dict[str, object]:
    names = ("title", "note", "description", "series")
    return {name: getattr(chart, name) for name in names} | {"svg": picture}


def _patterns(entrant: EntrantRecord) -> Sequence[TextPicture]:
    return (entrant.facts or {}).get("patterns", ())


def _sheet(entrant: EntrantRecord, index: int, key: Markup, pictures: list[Markup]) -> dict[str, object]:
    facts, settings = entrant.facts or {}, entrant.settings or {}
    facts_shown = [
        ("parameters", f"{entrant.parameters:,}" if entrant.parameters else "-"),
        ("width, layers", f"{facts['config']['dim']}, {len(facts['config']['layers'])}" if facts else "-"),
        ("learning rate", f"{entrant.lr:g}" if entrant.lr else "-"),
        ("state grows", ", ".join(sorted({member["growth"] for member in facts.get("members", ())})) or "-"),
        ("FLOPs of a step", f"{entrant.flops_step:.3g}" if entrant.flops_step else "-"),
        ("positions end at", f"{facts['max_length']:,}" if facts.get("max_length") else "nowhere"),
        ("changes", ", ".join(f"{path} = {value}" for path, value in entrant.set.items()) or "none"),
        ("exact attention where", "; ".join(member["exact_limit"] for member in facts.get("members", ())) or "-"),
    ]
    return {
        "index": index,
        "key": key,
        "name": entrant.name,
        "members": facts.get("members", ()),
        "error": entrant.error,
        "badges": [_badge(badge) for badge in entrant.badges],
        "formulas": facts.get("formulas", ()),
        "facts": facts_shown,
        "patterns": [
            {"svg": picture, "name": f"{pattern['pattern']}, tokens to a cell: {pattern['tokens_per_cell']}"}
            for picture, pattern in zip(pictures, _patterns(entrant), strict=True)
        ],
        "departures": [text for member in facts.get("members", ()) for text in member["departures"]],
        "command": entrant.runs[0].command if entrant.runs else "",
        "config": _json({"model": facts["config"], "settings": settings}) if facts else "",
    }


def _badge(badge: Badge) -> dict[str, str]:
    state, sign, word = SIGNS[badge["holds"]]
    why = f" ({badge['why']})" if badge["why"] else ""
    why += f"; without {', '.join(badge['left_out'])}" if badge["left_out"] else ""
    return {"state": state, "sign": sign, "word": word, "name": badge["name"], "law": badge["law"], "why": why}


def _picture(rows: Sequence[str]) -> str:
    """Return a pattern as SVG: queries down, keys across, a filled cell for what is seen."""
    cells = [(x, y) for y, row in enumerate(rows) for x, cell in enumerate(row.split()) if cell == SEEN]
    size = len(rows)
    path = "".join(f"M{x} {y}h.92v.92h-.92z" for x, y in cells)
    description = escape(
        f"attention pattern: {len(cells)} of {plural(size * size, 'cell')} seen, queries down, keys across"
    )
    drawn = f'<path d="{path}" style="fill: var(--s0)"/>'
    return f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="{description}">{drawn}</svg>'


def _json(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False)
