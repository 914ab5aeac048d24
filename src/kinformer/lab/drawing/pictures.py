"""Pictures as PNG or SVG files: panels side by side, a coloured text, or an image under a model's attention.

Panels of patterns follow the figures of Child et al. 2019, Beltagy et al. 2020 and Zaheer et al. 2020: queries run
down, and keys run across. The cell of the token itself is dark, and the cells of visible keys are light.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
from kinformer.lab.drawing.plots import BLUE, INK, ORANGE, PAPER, QUIET, SKY, bare, figure, plot_history, save
from kinformer.lab.training.logging import History
from kinformer.runtime.errors import plural, spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@dataclass(frozen=True, kw_only=True)
class ColouredText:
    """The ``pieces`` of text, each with the number of its group, or None.

    labels: a word for every group, under the ``legend``.
    ordered: whether groups have an order, which colours from light to dark show. Groups without an order have different
        colours, which repeat if there are too many groups.
    """

    pieces: Sequence[tuple[str, int | None]]
    legend: str
    labels: Sequence[str]
    ordered: bool


@dataclass(frozen=True, kw_only=True)
class HeatOver:
    """The heat ``values`` [rows, columns], one for each patch of ``patch`` x ``patch`` pixels; 1 is the mean."""

    name: str
    values: NDArray[np.float64]
    patch: int


@dataclass(frozen=True, kw_only=True)
class WindowsOver:
    """The windows of ``side`` x ``side`` patches of ``patch`` pixels on a side; they begin after ``shift`` patches."""

    name: str
    patch: int
    side: int
    shift: int

    def lines(self, pixels: int) -> list[int]:
        """Return the borders of windows along a side of ``pixels`` pixels."""
        step, first = self.side * self.patch, self.shift * self.patch
        return list(range(first or step, pixels, step))


@dataclass(frozen=True, kw_only=True)
class SeenImage:
    """The image ``pixels`` uint8 [height, width, 1 or 3], and the layers drawn ``over`` it."""

    pixels: NDArray[np.uint8]
    over: Sequence[HeatOver | WindowsOver]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of a subject of a ``kind``: its ``title``, its ``content``, ``lines`` about each part, and ``facts``
    for JSON. ``more`` follows the title in printed text."""

    title: str
    content: ColouredText | SeenImage | History | Sequence[Panel]
    kind: str = "run"
    more: str = ""
    lines: Sequence[str] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Draw the picture into a file; the ending of ``path`` chooses PNG or SVG."""
        if isinstance(self.content, ColouredText):
            _draw_text(self.content, self.title, path)
        elif isinstance(self.content, SeenImage):
            _draw_image(self.content, self.title, path)
        elif isinstance(self.content, History):
            plot_history(self.content, self.title, path)
        else:
            draw_panels(self.content, self.title, path)


MAX_PANELS = 24


def picture_of(kind: str, title: str, panels: Sequence[Panel]) -> Picture:
    """Return the picture of the first ``MAX_PANELS`` panels; the facts cover all panels."""
    drawn, more = panels[:MAX_PANELS], ""
    if len(panels) > len(drawn):
        more = spelled(f" ({len(drawn)} of {len(panels)}; choose with `layer` and `head`)")
    facts = {"drawn": len(drawn), "panels": [_facts(panel) for panel in panels]}
    return Picture(kind=kind, title=title, content=drawn, more=more, lines=[*map(_line, drawn)], facts=facts)


def _line(panel: Panel) -> str:
    line = ", ".join(part.replace("\n", ", ") for part in (panel.place, panel.name) if part)
    if isinstance(panel, PatternPanel):
        pairs = f"{panel.allowed_pairs:,} of {plural(panel.length**2, 'pair')} of {plural(panel.length, 'token')}"
        line += f" ({pairs}, {panel.allowed_pairs / panel.length**2:.1%})"
    return line


def _facts(panel: Panel) -> dict[str, object]:
    """Return a panel as data for JSON, without its arrays."""
    shown = {name: value for name, value in asdict(panel).items() if not isinstance(value, np.ndarray)}
    return {"panel": type(panel).__name__.removesuffix("Panel").lower()} | shown


# Panels as small multiples under one title.

COLUMNS = 4
SIZE, GAP, MARGIN, TOP, HEAD, LINE = 2.7, 0.62, 0.55, 0.42, 0.56, 0.15
FOOT, SHIFT, LABELS, LEGEND = 0.12, 0.3, 0.42, 0.26
"""Lengths in inches: a panel, the space after it, on the left, for the title, over a panel (alone, and per line of
text), and below."""
PAST, FUTURE = "#DFE3E6", "#F5F6F7"
KINDS = {ITSELF: (BLUE, "the token itself"), SEEN: (SKY, "seen"), UNSEEN: (PAST, "not seen"), LATER: (FUTURE, "later")}
FAINTEST = 0.35
MOST_NUMBERS = 64
"""The most cells of a panel of numbers that also shows the numbers as text."""


def draw_panels(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw all panels as small multiples under one title; the ending of ``path`` chooses PNG or SVG."""
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
            if isinstance(panel, PatternPanel):
                _pattern(axes, panel)
            elif isinstance(panel, FieldPanel):
                _field(axes, panel)
            elif isinstance(panel, HeatPanel):
                _heat(axes, panel)
            else:
                _curves(axes, panel)
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


def _title(panel: Panel, title: str) -> list[str]:
    """Return at most four lines: the place of the panel's part, and its name unless the figure's title holds it."""
    parts = [part for part in panel.name.split("\n") if part != title]
    lines = [line for part in parts for line in wrap(part, 44)]
    return ([panel.place] if panel.place else []) + (lines if len(lines) < 4 else [*lines[:2], f"{lines[2]} ..."])


def _tops(panel: Panel) -> bool:
    """Return whether the ticks of the panel are on top."""
    return isinstance(panel, PatternPanel | FieldPanel)


def _pattern(axes: Axes, panel: PatternPanel) -> None:
    cells = len(panel.shares)
    query, key = np.indices((cells, cells))
    colours = np.where((key > query)[..., None] & panel.causal, _rgb(FUTURE), _rgb(PAST))
    strength = np.where(panel.shares > 0, FAINTEST + (1 - FAINTEST) * panel.shares, 0.0)[..., None]
    colours = colours + strength * (_rgb(SKY) - colours)
    itself = (query == key) & (panel.shares > 0)
    colours[itself] = _rgb(BLUE)
    _mosaic(axes, colours, ("queries", panel.length), ("keys", panel.length))
    if panel.tokens_per_cell > 1:
        axes.annotate(
            f"1 cell = {plural(panel.tokens_per_cell, 'token')}", (1, 0), (0, -5), "axes fraction",
            textcoords="offset points", ha="right", va="top", fontsize=7.5, color=QUIET,
        )  # fmt: skip


def _field(axes: Axes, panel: FieldPanel) -> None:
    colours = np.array([_rgb(KINDS[kind][0]) for kind in sorted(KINDS)])[panel.shown]
    _mosaic(axes, colours, ("row", len(panel.shown)), ("column", panel.shown.shape[1]))


def _mosaic(axes: Axes, colours: np.ndarray, down: tuple[str, int], across: tuple[str, int]) -> None:
    """Draw square cells with thin lines between them; ``down`` and ``across`` are each axis's name and length."""
    rows, columns = colours.shape[:2]
    across_cells, down_cells, width = np.arange(columns + 1), np.arange(rows + 1), min(0.8, 14 / max(rows, columns))
    axes.pcolormesh(across_cells, down_cells, colours, edgecolors=PAPER, linewidth=width)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal")
    axes.set_xticks([0.5, columns - 0.5], ["0", str(across[1] - 1)])
    axes.set_yticks([0.5, rows - 0.5], ["0", str(down[1] - 1)])
    axes.set_xlabel(across[0], labelpad=-7)
    axes.set_ylabel(down[0], labelpad=-9)
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
    _colour_bar(axes, image)


def _colour_bar(axes: Axes, image: AxesImage) -> None:
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)


def _curves(axes: Axes, panel: CurvePanel) -> None:
    from matplotlib import colormaps

    heads, length = panel.curves.shape
    shades = [colormaps["viridis"](0.82 * head / max(1, heads - 1)) for head in range(heads)]
    for head, (curve, shade) in enumerate(zip(panel.curves, shades, strict=True)):
        axes.plot(np.arange(length), curve, color=shade, linewidth=1.3, label=f"head {head + 1}")
    bare(axes, "left", "bottom")
    axes.set_xlim(0, max(1, length - 1))
    axes.set_xlabel("distance (query - key)")
    axes.tick_params(length=2, labelsize=7.5)
    if heads > 1:
        axes.legend(
            bbox_to_anchor=(1.0, 1.0), loc="upper left", borderaxespad=0.0, frameon=False, fontsize=7, handlelength=0.8,
        )  # fmt: skip


def _legend(drawn: Figure, panels: Sequence[Panel], left: float) -> None:
    from matplotlib.patches import Patch

    fields = [panel for panel in panels if isinstance(panel, FieldPanel)]
    patterns = [panel for panel in panels if isinstance(panel, PatternPanel)]
    if not fields and not patterns:
        return
    needed = {ITSELF, SEEN}.union(*(set(np.unique(field.shown).tolist()) for field in fields))
    for panel in patterns:
        needed |= {LATER} if panel.causal else set()
        # a key hidden by the pattern, not by causality
        shares = np.tril(panel.shares, -1) + np.triu(np.ones_like(panel.shares)) if panel.causal else panel.shares
        needed |= {UNSEEN} if (shares == 0).any() else set()
    patches = [Patch(facecolor=KINDS[kind][0], label=KINDS[kind][1]) for kind in sorted(needed, reverse=True)]
    drawn.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(left, 0.0), borderaxespad=0.3, borderpad=0.2,
        ncols=len(patches), frameon=False, fontsize=8, handlelength=0.9, handleheight=0.9, columnspacing=1.4,
        handletextpad=0.5, labelcolor=INK,
    )  # fmt: skip


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])


# A text coloured token by token.

CHARACTERS = 84
CELL, TEXT_LINE, AROUND, ABOVE, BELOW = 0.092, 0.19, 0.3, 0.5, 0.55
"""Lengths in inches: the width of a character, the height of a line, the space around, above and below the text."""
LIGHTEST, DARKEST = 0.06, 0.85
MOST_LABELS = 16
Colour = tuple[float, ...]
"""Red, green and blue from 0 to 1, and opacity."""


def _draw_text(text: ColouredText, title: str, path: Path) -> None:
    """Draw the text in lines of at most ``CHARACTERS`` characters, and a legend."""
    lines = list(_rows(text.pieces))
    width, height = 2 * AROUND + CHARACTERS * CELL, ABOVE + len(lines) * TEXT_LINE + BELOW
    colours = _colours(len(text.labels), text.ordered)
    with figure(width, height) as drawn:
        axes = drawn.add_axes((AROUND / width, BELOW / height, 1 - 2 * AROUND / width, len(lines) * TEXT_LINE / height))
        axes.set_xlim(0, CHARACTERS)
        axes.set_ylim(len(lines), 0)
        axes.axis("off")
        for row, line in enumerate(lines):
            for column, (character, group) in enumerate(line):
                _cell(axes, (column, row), character, None if group is None else colours[group])
        drawn.text(AROUND / width, 1 - 0.25 / height, title, fontsize=10, weight="bold", va="center")
        _text_legend(drawn, text, colours, (width, height))
        save(drawn, path)


def _rows(pieces: Sequence[tuple[str, int | None]]) -> Iterator[list[tuple[str, int | None]]]:
    """Yield a list of characters with their groups for each line; the end of a line is shown as a character too."""
    line: list[tuple[str, int | None]] = []
    for piece, group in pieces:
        for character in piece:
            line.append(("\u21b5" if character == "\n" else character if character.isprintable() else " ", group))
            if character == "\n" or len(line) == CHARACTERS:
                yield line
                line = []
    if line:
        yield line


def _cell(axes: Axes, place: tuple[int, int], character: str, colour: Colour | None) -> None:
    from matplotlib.patches import Rectangle

    column, row = place
    if colour is not None:
        axes.add_patch(Rectangle((column, row + 0.06), 1, 0.88, facecolor=colour, linewidth=0))
    ink = QUIET if character == "\u21b5" else INK if colour is None or sum(colour[:3]) > 1.5 else PAPER
    if character != " ":
        axes.text(
            column + 0.5, row + 0.5, character, ha="center", va="center", fontsize=8, family="monospace", color=ink
        )


def _text_legend(drawn: Figure, text: ColouredText, colours: Sequence[Colour], size: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    width, height = size
    shown = text.labels[:MOST_LABELS]
    step = min(1.1, (width - 2 * AROUND - 0.9) / len(shown))
    drawn.text(AROUND / width, 0.3 / height, text.legend, fontsize=8, va="center")
    for index, (label, colour) in enumerate(zip(shown, colours, strict=False)):
        left = AROUND + 0.6 + index * step
        drawn.add_artist(Rectangle((left / width, 0.22 / height), 0.16 / width, 0.16 / height, facecolor=colour))
        drawn.text((left + 0.22) / width, 0.3 / height, label, fontsize=8, va="center")


def _colours(count: int, ordered: bool) -> list[Colour]:
    """Return ``count`` colours: from light to dark if ``ordered``, else light colours, which repeat."""
    from matplotlib import colormaps

    if not ordered:
        names = ("Pastel1", "Set3") if count <= 20 else ("Pastel1", "Set3", "Pastel2", "Accent", "Set2", "tab20")
        palette = [colour for name in names for colour in colormaps[name].colors]  # type: ignore[attr-defined]
        return [palette[index % len(palette)] for index in range(count)]
    steps = [LIGHTEST + (DARKEST - LIGHTEST) * index / max(1, count - 1) for index in range(count)]
    return [colormaps["Blues"](step) for step in steps]


# An image beside a model's attention to it.

IMAGES, IMAGE, OVER, COVER = 4, 2.4, 0.5, 0.6
"""Panels in a line; the sizes in inches of a panel and of the space over it; the opacity of the heat over the image."""


def _draw_image(image: SeenImage, title: str, path: Path) -> None:
    """Draw the image, and a panel for each layer drawn over it; the ending of ``path`` chooses PNG or SVG."""
    count = 1 + len(image.over)
    columns = min(IMAGES, count)
    rows = ceil(count / columns)
    tall = IMAGE * min(2.0, image.pixels.shape[0] / image.pixels.shape[1])
    width, height = 2 * AROUND + columns * (IMAGE + GAP), TOP + rows * (tall + OVER) + AROUND / 2
    with figure(width, height) as drawn:
        for index, panel in enumerate((None, *image.over)):
            row, column = divmod(index, columns)
            left, bottom = AROUND + column * (IMAGE + GAP), height - TOP - (row + 1) * (tall + OVER)
            axes = drawn.add_axes((left / width, bottom / height, IMAGE / width, tall / height))
            _lay_over(axes, image.pixels, panel)
        heading = shorten(title, 8 + 28 * columns, placeholder=" ...")
        drawn.text(AROUND / width, 1 - 0.24 / height, heading, fontsize=11, fontweight="bold", va="center")
        save(drawn, path)


def _lay_over(axes: Axes, pixels: NDArray[np.uint8], panel: HeatOver | WindowsOver | None) -> None:
    height, width = pixels.shape[:2]
    shown = pixels if pixels.shape[2] == 3 else pixels.repeat(3, axis=2)
    if isinstance(panel, HeatOver):
        shown = shown.mean(2, keepdims=True).astype(np.uint8).repeat(3, axis=2)
    axes.imshow(shown, interpolation="nearest", extent=(0, width, height, 0))
    axes.set_title("the image" if panel is None else panel.name, loc="left", fontsize=8.5)
    if isinstance(panel, HeatOver):
        down, across = (size * panel.patch for size in panel.values.shape)
        image = axes.imshow(
            panel.values, cmap="inferno", alpha=COVER, vmin=0, interpolation="nearest", extent=(0, across, down, 0)
        )
        _colour_bar(axes, image)
    elif isinstance(panel, WindowsOver):
        for colour, thick in ((PAPER, 2.6), (ORANGE, 1.4)):
            for at in panel.lines(width):
                axes.axvline(at, color=colour, linewidth=thick)
            for at in panel.lines(height):
                axes.axhline(at, color=colour, linewidth=thick)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    bare(axes)
