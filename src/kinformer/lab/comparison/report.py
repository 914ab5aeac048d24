"""The report of a comparison as Markdown, and as one self-contained HTML page with style, script, charts and data."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias
from xml.etree import ElementTree

from kinformer.lab.comparison import words
from kinformer.lab.comparison.record import Comparison, EntrantRecord, MachineFacts, Point, mean_of
from kinformer.lab.comparison.speed import described
from kinformer.lab.comparison.words import RESOLUTION, Measure, resolution, shown, unit_of
from kinformer.lab.drawing.plots import figure
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import plural
from kinformer.runtime.parsing import dump_json

# Curves as SVG made by matplotlib, in the page's colours, with a label at every point.

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
INK, QUIET, FAINT = "#010101", "#020202", "#030303"
"""Placeholders in matplotlib's SVG, which the colours of the page replace."""
COLOURS = 8
MARKERS, SIGNS = ("o", "s", "^", "D", "v", "P", "X", "p"), "●■▲◆▼✚✖⬟"
"""The markers of points in charts, and the same shapes as characters for the legend."""
DASHES = ("-", "--", "-.", ":")
WIDTH, HEIGHT, MAX_POINTS = 5.4, 3.3, 60

ChartPoint: TypeAlias = tuple[float, float, str]
"""A point (x, y, label)."""


@dataclass(frozen=True)
class Series:
    """A curve: its ``name``, its ``index`` among the entrants, which decides its look, and its points."""

    name: str
    index: int
    points: Sequence[ChartPoint]


@dataclass(frozen=True)
class Chart:
    """Series over common axes. ``joined``: lines join the points. ``log``: the names of logarithmic axes."""

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
        curves = plural(len(self.series), "curve")
        return f"{self.title}: {self.y} against {self.x}, {curves}; the numbers are in the table below."


def svg(chart: Chart) -> str:
    """Return the chart as an SVG element for HTML. Its colours are CSS variables (``--s0`` and on, ``--ink``,
    ``--muted``, ``--line``); every point carries ``data-tip`` and ``data-series``."""
    import matplotlib
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    series = [Series(item.name, item.index, _drawable(item.points, chart.log)) for item in chart.series]
    buffer = io.StringIO()
    settings: Any = {"svg.fonttype": "none", "path.simplify": False, "svg.hashsalt": "kinformer",
                     "axes.unicode_minus": False}  # fmt: skip
    with figure(WIDTH, HEIGHT) as drawn:
        axes = drawn.add_axes((0.13, 0.17, 0.84, 0.77))
        for number, item in enumerate(series):
            xs, ys = [point[0] for point in item.points], [point[1] for point in item.points]
            dashes = DASHES[item.index // COLOURS % len(DASHES)] if chart.joined else "none"
            (line,) = axes.plot(xs, ys, color=_placeholder(item.index), marker=MARKERS[_shape(item.index)],
                                markersize=5 if chart.joined else 9, linewidth=1.6, clip_on=False,
                                linestyle=dashes)  # fmt: skip
            line.set_gid(f"series-{number}")
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
        drawn.set_facecolor("none")
        with matplotlib.rc_context(settings):
            drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _adapted(buffer.getvalue(), chart, series)


def _adapted(text: str, chart: Chart, series: Sequence[Series]) -> str:
    """Return matplotlib's SVG with labels at its points, the colours of the page, and unique ids."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(text[text.index("<svg") :])
    for parent in list(root.iter()):
        for child in [item for item in parent if item.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style")]:
            parent.remove(child)
    for number, line in enumerate(series):
        group = root.find(f".//{{{SVG}}}g[@id='series-{number}']")
        assert group is not None
        group.set("data-series", str(line.index))
        for mark, point in zip(list(group.iter(f"{{{SVG}}}use")), line.points, strict=True):
            mark.attrib |= {"class": "pt", "data-series": str(line.index), "data-tip": f"{line.name}: {point[2]}"}
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "presentation", "aria-hidden": "true", "focusable": "false"}
    out = ElementTree.tostring(root, encoding="unicode")
    out = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.key}-", out)
    colours = {INK: "var(--ink)", QUIET: "var(--muted)", FAINT: "var(--line)"}
    colours |= {_placeholder(index): f"var(--s{index})" for index in range(COLOURS)}
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: colours.get(match[0], match[0]), out)


def _placeholder(index: int) -> str:
    """Return the placeholder of an entrant's colour in matplotlib's SVG."""
    return f"#0a0b{0x10 + index % COLOURS:02x}"


def _shape(index: int) -> int:
    """Return the number of an entrant's marker; entrants of one colour have different markers."""
    return (index + index // COLOURS) % len(MARKERS)


def _drawable(points: Sequence[ChartPoint], log: str) -> Sequence[ChartPoint]:
    """Return at most ``MAX_POINTS`` points that the axes can show, with the first and the last point."""
    logarithmic = ["xy".index(axis) for axis in log]
    points = [at for at in points if all(map(isfinite, at[:2])) and all(at[:2][place] > 0 for place in logarithmic)]
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


# The charts of a comparison and the labels of their points.


def charts(comparison: Comparison) -> list[tuple[str, list[Chart]]]:
    """Return sections of charts by title; charts without data are left out."""
    metric, unit, every = comparison.deciding, unit_of(comparison.deciding), comparison.entrants
    length, corner = words.common_length(comparison), "Lower" if comparison.lower_is_better else "Upper"

    def chart(
        key: str, title: str, x: str, y: str, points_of: Callable[[EntrantRecord], Iterator[ChartPoint]],
        log: str = "x", least: int = 1, **more: Any,
    ) -> Chart:  # fmt: skip
        curves = [(item.name, index, list(points_of(item))) for index, item in enumerate(every)]
        return Chart(key, title, x, y, [Series(*one) for one in curves if len(one[2]) >= least], log, **more)

    def labelled(points: Iterable[tuple[float | None, float]], text: Callable[[float], str]) -> Iterator[ChartPoint]:
        return ((x, value, f"{text(x)}, {shown(metric, value)}") for x, value in points if x is not None)

    def learnt(of: Callable[[Point], float | None], text: Callable[[float], str]) -> Any:
        return lambda item: labelled(_mean_curve(item, of), text)

    def at(of: Callable[[EntrantRecord], float | None], text: Callable[[float], str]) -> Any:
        return lambda item: labelled([(of(item), mean_of(item))] if item.runs else [], text)

    means = "The mean over the seeds where they were validated at the same steps."
    low = f"{corner} left is better."
    bits = f"validation {unit}"
    resolved = (
        "The highest moment of a training step of one row, above the model itself, in a separate process; on a CPU, "
        f"memory below {size(RESOLUTION)} cannot be resolved and is not drawn."
    )
    sections = {
        "Learning": [
            chart("by-steps", "Against steps", "steps", bits,
                  learnt(lambda point: float(point.step), "{:,.0f} steps".format), "", 2, note=means),
            chart("by-seconds", "Against time", "seconds of training", bits,
                  learnt(lambda point: point.seconds, "{:,.1f} s".format), "", 2, note=means),
            chart("by-flops", "Against FLOPs", "FLOPs", bits,
                  learnt(lambda point: point.flops, "{:.3g} FLOPs".format), least=2, note=means),
        ],
        "Quality against its costs": [
            chart("quality-state", "State", f"bytes of state after {plural(length, 'token')}", f"test {unit}",
                  at(lambda item: words.state_at(item, length), size), joined=False, note=low),
            chart("quality-time", "Training time", "seconds of training", f"test {unit}",
                  at(lambda item: mean(run.seconds for run in item.runs), "{:,.0f} s".format), joined=False, note=low),
            chart("quality-memory", "Memory", "peak bytes in training", f"test {unit}", at(words.peak_bytes, size),
                  joined=False, note=low),
            chart("quality-speed", "Generation", "tokens/s, one text", f"test {unit}",
                  at(lambda item: words.generated(item, 1), "{:,.0f}/s".format), joined=False,
                  note=f"{corner} right is better."),
        ],
        "Position and longer contexts": [
            chart("positions", "By position", "tokens before", f"test {unit}", partial(_positions, metric),
                  note="First seed; tokens that a prediction had before it in its window, of the longest context "
                  "measured."),
            chart("contexts", "By length of context", "tokens of context", f"test {unit}",
                  lambda item: labelled(sorted(words.contexts_of(item).items()), lambda x: plural(int(x), "token")),
                  least=2, note="First seed; each length has its own windows."),
        ],
        "Time and memory against length": [
            chart("length-step", "A training step", "tokens of one row", "milliseconds", partial(_times, "step"), "xy"),
            chart("length-forward", "A forward", "tokens of one row", "milliseconds", partial(_times, "forward"), "xy"),
            chart("length-memory", "Memory of a step", "tokens of one row", "MiB", _memory, "xy", note=resolved),
            chart("state", "The state of one row", "tokens absorbed", "KiB", _states, "xy"),
        ],
        "The sweep of learning rates": [
            chart("sweep", "Learning rates", "learning rate", bits,
                  lambda item: labelled(((trial.lr, trial.validation) for trial in item.sweep
                                         if trial.validation is not None), "learning rate {:g}".format),
                  note="After short runs with the first seed; what diverged is not shown."),
        ],
    }  # fmt: skip
    drawn = {title: [item for item in section if item.series] for title, section in sections.items()}
    return [(title, section) for title, section in drawn.items() if section]


def _mean_curve(entrant: EntrantRecord, of: Callable[[Point], float | None]) -> Iterator[tuple[float, float]]:
    runs = entrant.runs
    if any([point.step for point in run.curve] != [point.step for point in runs[0].curve] for run in runs):
        runs = runs[:1]
    for points in zip(*(run.curve for run in runs), strict=True):
        xs = [x for point in points if (x := of(point)) is not None]
        if len(xs) == len(points) and mean(xs) > 0:
            yield mean(xs), mean(point.validation for point in points)


def _positions(metric: Any, entrant: EntrantRecord) -> Iterator[ChartPoint]:
    rows = [row for run in entrant.runs[:1] for row in run.contexts if row.get("context") and row["positions"]]
    for part in max(rows, key=lambda row: row["context"])["positions"] if rows else ():
        first, last, value = part["first"], part["last"], part["bits_per_byte"]
        yield last, value, f"{first:,} to {plural(last, 'token')} before, {shown(metric, value)}"


def _times(kind: str, entrant: EntrantRecord) -> Iterator[ChartPoint]:
    for length, seconds in sorted(words.seconds_of(entrant, kind).items()):
        yield length, 1000 * seconds, f"{plural(length, 'token')}, {1000 * seconds:,.1f} ms"


def _memory(entrant: EntrantRecord) -> Iterator[ChartPoint]:
    for row in entrant.memory["lengths"] if entrant.memory else ():
        if row["bytes"] >= resolution(entrant):
            yield row["length"], row["bytes"] / 2**20, f"{plural(row['length'], 'token')}, {size(row['bytes'])}"


def _states(entrant: EntrantRecord) -> Iterator[ChartPoint]:
    for length, count in sorted((int(length), count) for length, count in (entrant.state_bytes or {}).items()):
        if count:
            yield length, count / 1024, f"{plural(length, 'token')}, {size(count)}"


# The table of results, the heading and the conditions for both forms of the report.


def columns(comparison: Comparison) -> list[Measure]:
    """Return the columns of the table of results; a column without any value is left out."""
    metric = comparison.deciding
    ps = {item.name: item.together for item in words.differences(comparison)} if comparison.finished else {}
    table = [
        Measure(
            f"test {unit_of(metric)}", lambda item: mean_of(item) if item.runs else None, partial(shown, metric),
            metric.lower_is_better,
        ),
        Measure("± seeds", words.spread, lambda value: shown(metric, value)),
        Measure("p against the best", lambda item: ps.get(item.name), "{:.3f}".format),
        Measure("parameters", lambda item: item.parameters or None, "{:,}".format),
        Measure("learning rate", lambda item: item.lr, "{:g}".format),
        *words.costs(comparison),
    ]  # fmt: skip
    return [measure for measure in table if any(measure.value(item) is not None for item in comparison.entrants)]


def ordered(comparison: Comparison) -> list[EntrantRecord]:
    """Return the entrants from the best to the worst, failed ones last; as named where no ranking is made."""
    if comparison.finished and words.doubts(comparison):
        return list(comparison.entrants)
    return [*comparison.finished, *(entrant for entrant in comparison.entrants if not entrant.runs)]


def title(comparison: Comparison) -> str:
    """Return the report's heading: how many members, the task and the data."""
    data = comparison.data.get("name", "") if isinstance(comparison.data, dict) else ""
    return f"{plural(len(comparison.entrants), 'member')} on {comparison.task}{f', {data}' if data else ''}"


def conditions(comparison: Comparison) -> str:
    """Return the budget, data, machine and versions in one paragraph."""
    budget, data = comparison.budget, comparison.data if isinstance(comparison.data, dict) else {}
    steps = budget.get("steps") or [0]
    rates = "each at the learning rate of a sweep" if budget.get("sweep_steps") else "learning rates without a sweep"
    made = plural(steps[0], "step") if len(steps) == 1 else f"{min(steps):,} to {max(steps):,} steps"
    where = next((entrant.machine for entrant in comparison.entrants if entrant.machine), MachineFacts())
    limit = data.get("max_bytes")
    first = f", its first {plural(limit, 'byte')}" if limit else ""
    return (
        f"{plural(budget['parameters'], 'parameter')} within 5 %, {made} of {plural(budget['tokens_step'], 'token')}, "
        f"{plural(budget['seeds'], 'seed')}; the same data in the same order, the same recipe, {rates}. "
        f"Data: {data.get('name', '?')} {data.get('version', '')}, {data.get('split', '')} "
        f"split{first}. kinformer {comparison.kinformer}, torch {(where.get('versions') or {}).get('torch')}, Python "
        f"{where.get('python')}, on {described(where)}; {comparison.created}."
    )


def markdown(comparison: Comparison) -> str:
    """Return the comparison as a page of Markdown."""
    table = columns(comparison)
    rows = [["member", *(column.title for column in table)]]
    rows += [[entrant.name, *(column.cell(entrant) for column in table)] for entrant in ordered(comparison)]
    first, *others = ("| " + " | ".join(map(_prose, row)) + " |" for row in rows)
    sentences = [*words.summary(comparison), *words.crossovers_of(comparison)]
    lines = [f"# {_prose(title(comparison))}", "", *(f"- {_prose(item)}" for item in sentences), ""]
    lines += [first, "| --- |" + " ---: |" * len(table), *others]
    lines += ["", *(f"- {_prose(item)}" for item in words.departures(comparison))]
    lines += ["", _prose(conditions(comparison)), "", "    " + _line(comparison.command), ""]
    for entrant in comparison.entrants:
        if entrant.runs:
            lines += [f"{_prose(entrant.name)} alone:", "", "    " + _line(entrant.runs[0].command), ""]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Return ``text``, which may hold names from other people, so that Markdown shows it unchanged, without links."""
    marked = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", _line(text))
    plain = escape(marked, quote=False).replace("://", "&#58;//").replace("@", "&#64;").replace("www.", "www&#46;")
    return re.sub(r"^(\d*)([-+.)]) ", r"\1\\\2 ", plain)


def _line(text: str) -> str:
    """Return ``text`` as one line that cannot end a block of code."""
    return " ".join(text.split())


# The page.

ASSETS = Path(__file__).parent / "assets"


def page(comparison: Comparison) -> str:
    """Return the page. All text of the comparison is escaped, because it may come from other people."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    loader = FileSystemLoader(ASSETS)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    index = {entrant.name: number for number, entrant in enumerate(comparison.entrants)}
    baselines = (comparison.baselines or {}).items()
    machine = [{entrant.name: entrant.machine} for entrant in comparison.entrants][:1] + [comparison.seconds]
    return environment.get_template("page.html").render(
        title=title(comparison),
        conditions=conditions(comparison),
        summary=words.summary(comparison),
        columns=columns(comparison),
        rows=list(_rows(comparison)),
        departures=words.departures(comparison),
        baselines=", ".join(f"{name.replace('_', ' ')} {shown(comparison.deciding, at)}" for name, at in baselines),
        sections=charts(comparison),
        crossovers=list(words.crossovers_of(comparison)),
        draw=lambda chart: Markup(svg(chart)),
        index=index,
        signs={name: (SIGNS[_shape(number)], number % COLOURS) for name, number in index.items()},
        sheets=[(entrant, entrant.facts or {}, _facts(entrant)) for entrant in ordered(comparison)],
        command=comparison.command,
        json=lambda data: dump_json(data, indent=1),
        machine=machine,
        style=Markup((ASSETS / "style.css").read_text(encoding="utf-8")),
        script=Markup((ASSETS / "script.js").read_text(encoding="utf-8")),
    )


def _rows(comparison: Comparison) -> Iterator[tuple[EntrantRecord, list[tuple[str, str, bool]]]]:
    """Yield every entrant with its cells: the text, the value to sort by, and whether it is the best of the column."""
    table = columns(comparison)
    best: list[float | None] = []
    for column in table:
        all_values = [value for entrant in comparison.entrants if (value := column.value(entrant)) is not None]
        best.append((min if column.less else max)(all_values) if column.less is not None and all_values else None)
    for entrant in ordered(comparison):
        values = [column.value(entrant) for column in table]
        cells = zip(table, values, best, strict=True)
        yield (
            entrant,
            [
                (column.cell(entrant), "" if value is None else repr(value), value is not None and value == top)
                for column, value, top in cells
            ],
        )


def _facts(entrant: EntrantRecord) -> dict[str, str]:
    facts = entrant.facts or {}
    members = facts.get("members", ())
    return {
        "parameters": f"{entrant.parameters:,}" if entrant.parameters else "-",
        "width, layers": f"{facts['config']['dim']}, {len(facts['config']['layers'])}" if facts else "-",
        "learning rate": f"{entrant.lr:g}" if entrant.lr else "-",
        "state grows": ", ".join(sorted({member["growth"] for member in members})) or "-",
        "FLOPs of a step": f"{entrant.flops_step:.3g}" if entrant.flops_step else "-",
        "positions end at": f"{facts['max_length']:,}" if facts.get("max_length") else "nowhere",
        "changes": ", ".join(f"{path} = {value}" for path, value in entrant.set.items()) or "none",
        "exact attention where": "; ".join(member["exact_limit"] for member in members) or "-",
    }
