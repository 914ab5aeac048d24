"""What result files say of one member in numbers: the bars and lines of their plots that bear its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from generator.charts import Bars, Plot
from generator.plots import PLOTS
from generator.results import Result

PLAIN = ("gpt", "rope", "bert", "vit", "speech-softmax")
"""Members by exact attention, with which others are compared where a result has both."""
MOST = 4
"""Values of one member and plot."""


class Value(NamedTuple):
    """A measured value: its ``unit``, under which ``condition`` (or ""), and the ``plain`` member's beside it."""

    unit: str
    condition: str
    value: float
    plain: tuple[str, float] | None


def values_of(result: Result, name: str) -> list[Value]:
    """The values of a member, from the same numbers as the plot on the result's page."""
    if result.name not in PLOTS:
        return []
    return [value for plot in PLOTS[result.name](result.data) for value in list(_of_plot(plot, name))[:MOST]]


def _of_plot(plot: Plot, name: str) -> Iterator[Value]:
    for unit, group, values in _series(plot):
        for label, value in values.items():
            if (condition := _condition(label, name)) is not None:
                plain = next(
                    ((other, values[beside]) for other in PLAIN if other != name
                     for beside in values if _condition(beside, other) == condition),
                    None,
                )  # fmt: skip
                yield Value(unit, ", ".join(filter(None, (group, condition))), value, plain)


def _series(plot: Plot) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(unit, name of the group, label -> value); of a line the value at its end."""
    if isinstance(plot, Bars):
        yield from ((plot.unit, group, dict(values)) for group, values in plot.groups.items())
        return
    for end in sorted({points[-1][0] for points in plot.series.values()}):
        values = {name: at[end] for name, points in plot.series.items() if (at := dict(points)).get(end) is not None}
        ends = {name for name, points in plot.series.items() if points[-1][0] == end}
        yield plot.y, f"{plot.x} {end:,g}", {n: v for n, v in values.items() if n in ends or _first(n) in PLAIN}


def _condition(label: str, name: str) -> str | None:
    """What a label says besides the member's name; None where it is of something else."""
    match = re.fullmatch(rf"(?:(\w+), )?{re.escape(name)}(?:,? (.+))?", label, re.IGNORECASE)
    return None if match is None else ", ".join(filter(None, match.groups()))


def _first(label: str) -> str:
    return re.split(r"[, ]", label)[0]


def shown(value: float) -> str:
    """A value with four digits at most, thousands set apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 or not value else f"{value:.2g}"
