"""Returns against target returns, in the manner of Chen et al. 2021, figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from kinformer.figures.style import BLUE, FAINT, ORANGE, QUIET, bare, figure, save


class Mean(TypedDict):
    """The mean return of some episodes."""

    mean: float


class Point(Mean):
    """The mean return of episodes that aimed at ``target`` (None: at the best, whose mean is ``optimal``), and half the
    width of its ``confidence`` interval."""

    target: float | None
    confidence: float
    optimal: NotRequired[float]


def plot(rows: Sequence[Point], clone: Mean | None, best: float, title: str, path: Path) -> None:
    """Draw ``rows``, the best of the data and the mean of cloned behaviour; the last two are lines."""
    points = sorted((row["optimal"] if row["target"] is None else row["target"], row) for row in rows)
    with figure(5.4, 4.2) as drawn:
        axes = drawn.subplots()
        bare(axes, "left", "bottom")
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        axes.set_axisbelow(True)
        targets = [target for target, _ in points]
        means = [row["mean"] for _, row in points]
        low, high = min([*targets, *means]), max([*targets, *means])
        axes.plot([low, high], [low, high], color=QUIET, linewidth=0.8, linestyle=(0, (1, 1.4)), label="as asked for")
        axes.axhline(best, color=QUIET, linewidth=1.0, linestyle=(0, (4, 1.6)), label="best of the data")
        if clone is not None:
            axes.axhline(clone["mean"], color=ORANGE, linewidth=1.0, label="cloned behaviour")
        spread = [row["confidence"] for _, row in points]
        axes.errorbar(
            targets, means, yerr=spread, color=BLUE, marker="o", markersize=4, linewidth=1.6, capsize=2, label="agent"
        )
        axes.set_xlabel("return asked for")
        axes.set_ylabel("return (mean, 95 % confidence)")
        axes.set_title(title, loc="left")
        axes.legend(frameon=False)
        drawn.tight_layout()
        save(drawn, path)
