"""Panels as a picture, PNG or SVG, in the manner of the figures of Child et al. 2019, Beltagy et al. 2020 and Zaheer et
al. 2020: queries run down, keys across; a token's own cell is dark, the cells that it sees are light."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING

import numpy as np

from kinformer.lab.drawing.panels import (
    ITSELF,
    LATER,
    SEEN,
    UNSEEN,
    CurvePanel,
    FieldPanel,
    HeatPanel,
    Panel,
    PatternPanel,
)
from kinformer.lab.drawing.style import BLUE, INK, PAPER, QUIET, SKY, bare, figure, save, spread
from kinformer.runtime.errors import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
SIZE, GAP, MARGIN, TOP, HEAD, LINE, FOOT, SHIFT, LABELS, LEGEND = (
    2.7,
    0.62,
    0.55,
    0.42,
    0.56,
    0.15,
    0.12,
    0.3,
    0.42,
    0.26,
)
"""Inches: a panel, the space after it, on the left, for the title, over a panel without and per line of text, below."""
PAST, FUTURE = "#DFE3E6", "#F5F6F7"
KINDS = {ITSELF: (BLUE, "the token itself"), SEEN: (SKY, "seen"), UNSEEN: (PAST, "not seen"), LATER: (FUTURE, "later")}
FAINTEST = 0.35
MOST_NUMBERS = 64
"""Cells of a panel of numbers that also show them."""


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw all panels as small multiples under one title; the ending of ``path`` says whether as PNG or SVG."""
    columns = 3 if len(panels) in (5, 6, 9) else min(COLUMNS, len(panels))
    rows = ceil(len(panels) / columns)
    lines = [_title(panel, title) for panel in panels]
    head = HEAD + LINE * max(map(len, lines))
    foot = FOOT + (LEGEND if _tops(panels[0]) and not all(map(_tops, panels[(rows - 1) * columns :])) else 0)
    width, height = MARGIN + columns * (SIZE + GAP), TOP + rows * (SIZE + head) + foot
    with figure(width, height) as drawn:
        for index, (panel, text_lines) in enumerate(zip(panels, lines, strict=True)):
            row, column = divmod(index, columns)
            left, bottom = MARGIN + column * (SIZE + GAP), height - TOP - (row + 1) * (SIZE + head) + SHIFT
            wide = SIZE - (0 if _tops(panel) else LABELS)
            axes = drawn.add_axes((left / width, bottom / height, wide / width, SIZE / height))
            _paint(axes, panel)
            for line, text in enumerate(reversed(text_lines)):
                over = (18 if _tops(panel) else 6) + 72 * LINE * line
                weight = "bold" if text == panel.place else "normal"
                axes.annotate(
                    text, (0, 1), (0, over), "axes fraction", textcoords="offset points", fontsize=8.5, weight=weight
                )
        heading = shorten(title, 8 + 31 * columns, placeholder=" ...")
        drawn.text(MARGIN / width, 1 - 0.24 / height, heading, fontsize=11, fontweight="bold", va="center")
        _legend(drawn, panels, MARGIN / width)
        save(drawn, path)


def _paint(axes: Axes, panel: Panel) -> None:
    if isinstance(panel, PatternPanel):
        _pattern(axes, panel)
    elif isinstance(panel, FieldPanel):
        _field(axes, panel)
    elif isinstance(panel, HeatPanel):
        _heat(axes, panel)
    else:
        _curves(axes, panel)


def _title(panel: Panel, title: str) -> list[str]:
    """Return where the panel's part stands, and what it is unless the figure's title says so; at most four lines."""
    parts = [part for part in panel.name.split("\n") if part != title]
    lines = [line for part in parts for line in wrap(part, 44)]
    return ([panel.place] if panel.place else []) + (lines if len(lines) < 4 else [*lines[:2], f"{lines[2]} ..."])


def _tops(panel: Panel) -> bool:
    """Return whether the panel has its ticks on top."""
    return isinstance(panel, PatternPanel | FieldPanel)


def _pattern(axes: Axes, panel: PatternPanel) -> None:
    cells = len(panel.shares)
    query, key = np.indices((cells, cells))
    colours = np.where((key > query)[..., None] & panel.causal, _rgb(FUTURE), _rgb(PAST))
    strength = np.where(panel.shares > 0, FAINTEST + (1 - FAINTEST) * panel.shares, 0.0)[..., None]
    colours = colours + strength * (_rgb(SKY) - colours)
    itself = (query == key) & (panel.shares > 0)
    colours[itself] = _rgb(BLUE)
    _mosaic(axes, colours)
    ends = ["0", str(panel.length - 1)]
    axes.set_xticks([0.5, cells - 0.5], ends)
    axes.set_yticks([0.5, cells - 0.5], ends)
    axes.set_xlabel("keys", labelpad=-7)
    axes.set_ylabel("queries", labelpad=-9)
    if panel.tokens_per_cell > 1:
        axes.annotate(
            f"1 cell = {plural(panel.tokens_per_cell, 'token')}", (1, 0), (0, -5), "axes fraction",
            textcoords="offset points", ha="right", va="top", fontsize=7.5, color=QUIET,
        )  # fmt: skip


def _field(axes: Axes, panel: FieldPanel) -> None:
    colours = np.array([_rgb(KINDS[kind][0]) for kind in sorted(KINDS)])[panel.shown]
    _mosaic(axes, colours)
    height, width = panel.shown.shape
    axes.set_xticks([0.5, width - 0.5], ["0", str(width - 1)])
    axes.set_yticks([0.5, height - 0.5], ["0", str(height - 1)])
    axes.set_xlabel("column", labelpad=-7)
    axes.set_ylabel("row", labelpad=-9)


def _mosaic(axes: Axes, colours: np.ndarray) -> None:
    """Draw square cells with thin lines between, the first row on top."""
    rows, columns = colours.shape[:2]
    axes.pcolormesh(
        np.arange(columns + 1),
        np.arange(rows + 1),
        colours,
        edgecolors=PAPER,
        linewidth=min(0.8, 14 / max(rows, columns)),
    )
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=2, labelsize=7.5)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    bare(axes)


def _heat(axes: Axes, panel: HeatPanel) -> None:
    from matplotlib.ticker import MaxNLocator

    largest = float(np.abs(panel.values).max()) or 1.0
    low = -largest if panel.signed else 0.0
    colours = "RdBu_r" if panel.signed else "Blues"
    start = panel.first - 0.5
    height, width = (size * panel.tokens_per_cell + start for size in panel.values.shape)
    extent = (start, width, height, start)
    image = axes.imshow(
        panel.values, aspect="auto", interpolation="nearest", cmap=colours, extent=extent, vmin=low, vmax=largest
    )
    axes.set_xlabel(panel.columns)
    axes.set_ylabel(panel.rows)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=2, labelsize=7.5)
    bare(axes)
    if panel.values.size <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(panel.values):
            ink = PAPER if abs(value) > largest / 2 else INK
            place = (column + panel.first, row + panel.first)
            axes.text(*place, f"{value:.3g}", ha="center", va="center", fontsize=7.5, color=ink)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)


def _curves(axes: Axes, panel: CurvePanel) -> None:
    from matplotlib import colormaps

    heads, length = panel.curves.shape
    shades = [colormaps["viridis"](0.82 * head / max(1, heads - 1)) for head in range(heads)]
    for curve, shade in zip(panel.curves, shades, strict=True):
        axes.plot(np.arange(length), curve, color=shade, linewidth=1.3)
    bare(axes, "left", "bottom")
    axes.set_xlim(0, max(1, length - 1))
    axes.set_xlabel("distance (query - key)")
    axes.tick_params(length=2, labelsize=7.5)
    low, high = axes.get_ylim()
    ends = [(float(curve[-1]) - low) / (high - low) for curve in panel.curves]
    for head, (placed, shade) in enumerate(zip(spread(ends, 0.055), shades, strict=True)):
        label = f"head {head + 1}" if heads > 1 else ""
        axes.annotate(label, (1.02, placed), xycoords="axes fraction", color=shade, fontsize=7.5, va="center")


def _legend(drawn: Figure, panels: Sequence[Panel], left: float) -> None:
    from matplotlib.patches import Patch

    fields = [panel for panel in panels if isinstance(panel, FieldPanel)]
    patterns = [panel for panel in panels if isinstance(panel, PatternPanel)]
    if not fields and not patterns:
        return
    needed = {ITSELF, SEEN}.union(*(set(np.unique(field.shown).tolist()) for field in fields))
    needed |= {LATER for panel in patterns if panel.causal} | {UNSEEN for panel in patterns if _hides(panel)}
    patches = [Patch(facecolor=KINDS[kind][0], label=KINDS[kind][1]) for kind in sorted(needed, reverse=True)]
    drawn.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(left, 0.0), borderaxespad=0.3, borderpad=0.2,
        ncols=len(patches), frameon=False, fontsize=8, handlelength=0.9, handleheight=0.9, columnspacing=1.4,
        handletextpad=0.5, labelcolor=INK,
    )  # fmt: skip


def _hides(panel: PatternPanel) -> bool:
    """Return whether a query misses something that it might see."""
    shares = np.tril(panel.shares, -1) + np.triu(np.ones_like(panel.shares)) if panel.causal else panel.shares
    return bool((shares == 0).any())


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
