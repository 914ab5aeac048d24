"""A text coloured token by token: by how many layers predicted it, or by the bucket that it is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.figures.style import INK, PAPER, QUIET, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 84
CELL, LINE, MARGIN, TOP, FOOT = 0.092, 0.19, 0.3, 0.5, 0.55
"""Inches: a character's width, a line's height, the space around, above and below the text."""
LIGHTEST, DARKEST = 0.06, 0.85
MOST_LABELS = 16
Colour = tuple[float, ...]
"""Red, green and blue from 0 to 1, and opacity."""


@dataclass(frozen=True, kw_only=True)
class ColouredText:
    """The ``pieces`` of text, each with the number of its group, or None.

    ``labels``: a word for every group, under the ``legend``. ``ordered``: the groups go from little to much, and their
    colours from light to dark; else any two look different, as far as there are colours.
    """

    title: str
    pieces: Sequence[tuple[str, int | None]]
    legend: str
    labels: Sequence[str]
    ordered: bool


def draw_text(text: ColouredText, path: Path) -> None:
    """Draw the text in lines of at most ``COLUMNS`` characters, and a legend; PNG or SVG by the ending of ``path``."""
    lines = list(_lines(text.pieces))
    width, height = 2 * MARGIN + COLUMNS * CELL, TOP + len(lines) * LINE + FOOT
    colours = _colours(len(text.labels), text.ordered)
    with figure(width, height) as drawn:
        axes = drawn.add_axes((MARGIN / width, FOOT / height, 1 - 2 * MARGIN / width, len(lines) * LINE / height))
        axes.set_xlim(0, COLUMNS)
        axes.set_ylim(len(lines), 0)
        axes.axis("off")
        for row, line in enumerate(lines):
            for column, (character, group) in enumerate(line):
                _cell(axes, (column, row), character, None if group is None else colours[group])
        drawn.text(MARGIN / width, 1 - 0.25 / height, text.title, fontsize=10, weight="bold", va="center")
        _legend(drawn, text, colours, (width, height))
        save(drawn, path)


def _lines(pieces: Sequence[tuple[str, int | None]]) -> Iterator[list[tuple[str, int | None]]]:
    """Yield characters with their groups, a list for each line; the end of a line is shown, as its group is."""
    line: list[tuple[str, int | None]] = []
    for piece, group in pieces:
        for character in piece:
            line.append(("\u21b5" if character == "\n" else character if character.isprintable() else " ", group))
            if character == "\n" or len(line) == COLUMNS:
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


def _legend(drawn: Figure, text: ColouredText, colours: Sequence[Colour], size: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    width, height = size
    shown = text.labels[:MOST_LABELS]
    step = min(1.1, (width - 2 * MARGIN - 0.9) / len(shown))
    drawn.text(MARGIN / width, 0.3 / height, text.legend, fontsize=8, va="center")
    for index, (label, colour) in enumerate(zip(shown, colours, strict=False)):
        left = MARGIN + 0.6 + index * step
        drawn.add_artist(Rectangle((left / width, 0.22 / height), 0.16 / width, 0.16 / height, facecolor=colour))
        drawn.text((left + 0.22) / width, 0.3 / height, label, fontsize=8, va="center")


def _colours(count: int, ordered: bool) -> list[Colour]:
    """Return colours from light to dark, or, of groups without an order, light ones that go around."""
    from matplotlib import colormaps

    if not ordered:
        names = ("Pastel1", "Set3") if count <= 20 else ("Pastel1", "Set3", "Pastel2", "Accent", "Set2", "tab20")
        palette = [colour for name in names for colour in colormaps[name].colors]  # type: ignore[attr-defined]
        return [palette[index % len(palette)] for index in range(count)]
    steps = [LIGHTEST + (DARKEST - LIGHTEST) * index / max(1, count - 1) for index in range(count)]
    return [colormaps["Blues"](step) for step in steps]
