"""Bits per byte against a store's weight and against its size (Khandelwal et al. 2020, figures 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.figures.style import BLUE, FAINT, QUIET, RED, bare, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


def plot(alone: float, weights: Points, sizes: Points, path: Path) -> None:
    """Draw both curves as PNG or SVG; ``alone`` is the model's metric without a store. ``sizes`` may be empty."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    with figure(10.0 if sizes else 5.2, 3.8) as drawn:
        panels = drawn.subplots(1, 2 if sizes else 1, squeeze=False)[0]
        _panel(panels[0], alone, weights, BLUE)
        panels[0].set_xlabel("weight of the store")
        panels[0].set_ylabel("bits per byte")
        if sizes:
            _panel(panels[1], alone, sizes, RED)
            panels[1].set_xscale("log")
            panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
            panels[1].xaxis.set_minor_formatter(NullFormatter())
            panels[1].set_xlabel("entries in the store")
        drawn.tight_layout(w_pad=2.0)
        save(drawn, path)


def _panel(axes: Axes, alone: float, points: Points, colour: str) -> None:
    bare(axes, "left", "bottom")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axhline(alone, color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, marker="o", markersize=3)
    axes.annotate(
        "the model alone", (points[0][0], alone), (4, 2), textcoords="offset points", color=QUIET, ha="left",
        va="bottom", fontsize=7.5,
    )  # fmt: skip
