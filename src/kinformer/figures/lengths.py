"""Loss against context length and against position, in the manner of Press et al. 2022 (ALiBi), figures 1 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kinformer.figures.style import FAINT, QUIET, SERIES, bare, figure, save, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[tuple[int, float], ...]
Stroke = Literal["solid", "dashed", "dotted"]

HEADROOM = 0.4
ACROSS, DOWN = 0.06, 0.05
STROKES: dict[Stroke, str | tuple[float, tuple[float, ...]]] = {
    "solid": "-",
    "dashed": (0, (4, 1.6)),
    "dotted": (0, (1, 1.4)),
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One model: bits per byte at each context length, and by position (the last of each bin) in its longest window.

    ``trained``: its training length. Without a ``colour`` it gets one of its own.
    """

    name: str
    trained: int | None
    lengths: Points
    positions: Points
    colour: str | None = None
    stroke: Stroke = "solid"


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Draw both pictures side by side, as PNG or SVG by the ending of ``path``; values far above are cut off."""
    with figure(11.0, 4.7) as drawn:
        left, right = drawn.subplots(1, 2)
        colours = [curve.colour or SERIES[index % len(SERIES)] for index, curve in enumerate(curves)]
        _panel(left, curves, [curve.lengths for curve in curves], colours)
        left.set_xlabel("context length (tokens, non-overlapping windows)")
        left.set_ylabel("bits per byte")
        _panel(right, curves, [curve.positions for curve in curves], colours)
        right.set_xlabel("position in the longest window (tokens before, up to)")
        drawn.tight_layout(w_pad=2.0)
        save(drawn, path)


def _panel(axes: Axes, curves: Sequence[Curve], lines: Sequence[Points], colours: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    bare(axes, "left", "bottom")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    low, high = _range(curves, lines)
    for one, points, colour in zip(curves, lines, colours, strict=True):
        stroke = STROKES[one.stroke]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, linewidth=1.6, linestyle=stroke)
    trained = {curve.trained for curve in curves if curve.trained}
    for length in trained:
        axes.axvline(length, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if len(trained) == 1:
        axes.annotate(
            "training length", (trained.pop(), high), (-2, -2), textcoords="offset points", color=QUIET, rotation=90,
            va="top", ha="right", fontsize=7.5,
        )  # fmt: skip
    axes.set_ylim(low, high)
    ticks = sorted({x for points in lines for x, _ in points})
    shown = ticks[:: -(-len(ticks) // 9)]
    axes.set_xticks(shown, [str(tick) for tick in shown])
    axes.minorticks_off()
    if len(curves) > 1:
        _label(axes, [curve.name for curve in curves], lines, colours)


def _range(curves: Sequence[Curve], lines: Sequence[Points]) -> tuple[float, float]:
    """Return the range from the best value to somewhat above the models' values at their training length."""
    values = [y for points in lines for _, y in points]
    within = [y for one, points in zip(curves, lines, strict=True) for x, y in points if x == one.trained]
    low, high = min(values), max(values)
    if within:
        high = min(high, max(within) * (1 + HEADROOM))
    margin = 0.04 * ((high - low) or 1.0)
    return low - margin, high + margin


def _label(axes: Axes, names: Sequence[str], lines: Sequence[Points], colours: Sequence[str]) -> None:
    """Write each curve's name where it ends: beside its last point, or above the
    picture where it leaves that for good."""
    low, high = axes.get_ylim()
    left, right = (log2(x) for x in axes.get_xlim())
    ends = [((log2(points[-1][0]) - left) / (right - left), points[-1][1]) for points in lines]
    exits = [_exit(points, high) for points in lines]
    leaving = [index for index, left_at in enumerate(exits) if left_at is not None]
    staying = [index for index, left_at in enumerate(exits) if left_at is None]
    tops = spread([(exits[index] - left) / (right - left) for index in leaving], ACROSS)  # type: ignore[operator]
    for index, x in zip(leaving, tops, strict=True):
        axes.annotate(
            names[index], (x, 1.01), xycoords="axes fraction", color=colours[index], rotation=35, ha="left",
            va="bottom", fontsize=8, annotation_clip=False,
        )  # fmt: skip
    last = max((ends[index][0] for index in staying), default=0.0)
    groups = [i for i in staying if ends[i][0] == last], [i for i in staying if ends[i][0] < last]
    for sooner, group in enumerate(groups):
        offset = (0.012, -0.05) if sooner else (0.02, 0.0)
        heights = spread([(ends[index][1] - low) / (high - low) for index in group], DOWN)
        for index, height in zip(group, heights, strict=True):
            point = (ends[index][0] + offset[0], height + offset[1])
            axes.annotate(names[index], point, xycoords="axes fraction", color=colours[index], va="center", fontsize=8)


def _exit(points: Points, high: float) -> float | None:
    """Return log2 of where the curve crosses ``high`` for the last time, if it ends above."""
    if points[-1][1] <= high:
        return None
    below = max((index for index, (_, y) in enumerate(points) if y <= high), default=None)
    if below is None:
        return log2(points[0][0])
    (x0, y0), (x1, y1) = points[below], points[below + 1]
    return log2(x0) + (log2(x1) - log2(x0)) * (high - y0) / (y1 - y0)
