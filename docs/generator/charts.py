"""Plots as PNG in the style of all figures: bars, dots and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kinformer.lab.drawing.plots import SERIES, bare, figure
from kinformer.lab.drawing.plots import save as write

Points = Sequence[tuple[float, float]]
WIDTH, LINES_HEIGHT, LABEL_HEIGHT = 7.6, 3.2, 0.26
"""Of a plot, and of a label of bars; in inches."""


class Bars(NamedTuple):
    """``groups``: series -> label -> value; one series has no legend. ``log``: a logarithmic axis. ``dots``: dots on an
    axis that does not begin at zero, for values that differ little."""

    unit: str
    groups: Mapping[str, Mapping[str, float]]
    log: bool = False
    dots: bool = False

    @property
    def labels(self) -> list[str]:
        """Those of all series, each once."""
        return list(dict.fromkeys(label for values in self.groups.values() for label in values))


class Lines(NamedTuple):
    """``series``: name -> (x, y) in order. ``log``: the axes that are logarithmic, such as ``"xy"``."""

    x: str
    y: str
    series: Mapping[str, Points]
    log: str = ""


Plot = Bars | Lines


def save(plots: Sequence[Plot], path: Path) -> None:
    """Draw them one below the other into a PNG."""
    heights = [_height(plot) for plot in plots]
    with figure(WIDTH, sum(heights)) as picture:
        picture.set_layout_engine("constrained")
        rows = picture.subplots(len(plots), 1, squeeze=False, height_ratios=heights)
        for axes, plot in zip(rows[:, 0], plots, strict=True):
            bare(axes, "left", "bottom")
            axes.set_axisbelow(True)
            (_bars if isinstance(plot, Bars) else _lines)(axes, plot)
        write(picture, path)


def _height(plot: Plot) -> float:
    if isinstance(plot, Lines):
        return LINES_HEIGHT
    return 1.0 + LABEL_HEIGHT * len(plot.labels) * (1 + 0.5 * (len(plot.groups) > 1))


def _bars(axes: Any, plot: Bars) -> None:
    labels, height = plot.labels, 0.8 / len(plot.groups)
    for index, (name, values) in enumerate(plot.groups.items()):
        places = [labels.index(label) + height * (index - (len(plot.groups) - 1) / 2) for label in values]
        if plot.dots:
            axes.plot(list(values.values()), places, "o", label=name, color=SERIES[index % len(SERIES)])
        else:
            axes.barh(places, list(values.values()), height, label=name, color=SERIES[index % len(SERIES)])
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(plot.unit)
    axes.grid(axis="x", alpha=0.3)
    if plot.log:
        axes.set_xscale("log")
    _legend(axes, len(plot.groups))


def _lines(axes: Any, plot: Lines) -> None:
    for index, (name, points) in enumerate(plot.series.items()):
        axes.plot(*zip(*points, strict=True), marker=".", label=name or None, color=SERIES[index % len(SERIES)])
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(alpha=0.3)
    for axis in plot.log:
        getattr(axes, f"set_{axis}scale")("log")
    _legend(axes, len(plot.series))


def _legend(axes: Any, series: int) -> None:
    if series > 1:
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
