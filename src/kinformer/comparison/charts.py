"""Curves as SVG made by matplotlib, in the page's colours, with a label at every point."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from kinformer.figures.style import figure
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
