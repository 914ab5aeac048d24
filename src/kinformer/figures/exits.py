"""A text coloured by depth: for every token, how many layers predicted it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinformer.evaluation.early_exit import Exited
from kinformer.figures.style import INK, PAPER, QUIET, figure, save
from kinformer.runtime.words import plural

COLUMNS = 84
CELL, LINE, MARGIN, TOP, FOOT = 0.092, 0.19, 0.3, 0.5, 0.55
"""Inches: a character's width, a line's height, the space around, above and below the text."""
LIGHTEST, DARKEST = 0.06, 0.85


@dataclass(frozen=True, kw_only=True)
class ColouredText:
    """The ``pieces`` of text, each with the number of the exit that predicted it, None of the first."""

    title: str
    pieces: Sequence[tuple[str, int | None]]
    exited: Exited


def draw_exits(text: ColouredText, path: Path) -> None:
    """Draw the text in lines of at most ``COLUMNS`` characters, and a legend; PNG or SVG by the ending of ``path``."""
    lines = list(_lines(text.pieces))
    width, height = 2 * MARGIN + COLUMNS * CELL, TOP + len(lines) * LINE + FOOT
    colours = _colours(len(text.exited.layers))
    with figure(width, height) as drawn:
        axes = drawn.add_axes((MARGIN / width, FOOT / height, 1 - 2 * MARGIN / width, len(lines) * LINE / height))
        axes.set_xlim(0, COLUMNS)
        axes.set_ylim(len(lines), 0)
        axes.axis("off")
        for row, line in enumerate(lines):
            for column, (character, exit) in enumerate(line):
                _cell(axes, (column, row), character, None if exit is None else colours[exit])
        drawn.text(
            MARGIN / width,
            1 - 0.25 / height,
            f"{text.title}: {_short(text.exited)}",
            fontsize=10,
            weight="bold",
            va="center",
        )
        _legend(drawn, text.exited, colours, (width, height))
        save(drawn, path)


def _lines(pieces: Sequence[tuple[str, int | None]]) -> Iterator[list[tuple[str, int | None]]]:
    """Yield characters with their exits, a list for each line; the end of a line is shown, as its exit is."""
    line: list[tuple[str, int | None]] = []
    for piece, exit in pieces:
        for character in piece:
            line.append(("\u21b5" if character == "\n" else character if character.isprintable() else " ", exit))
            if character == "\n" or len(line) == COLUMNS:
                yield line
                line = []
    if line:
        yield line


def _cell(axes: Any, place: tuple[int, int], character: str, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    column, row = place
    if colour is not None:
        axes.add_patch(Rectangle((column, row + 0.06), 1, 0.88, facecolor=colour, linewidth=0))
    ink = QUIET if character == "\u21b5" else INK if colour is None or sum(colour[:3]) > 1.5 else PAPER
    if character != " ":
        axes.text(
            column + 0.5, row + 0.5, character, ha="center", va="center", fontsize=8, family="monospace", color=ink
        )


def _legend(drawn: Any, exited: Exited, colours: Sequence[Any], size: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    width, height = size
    step = min(1.1, (width - 2 * MARGIN - 0.9) / len(colours))
    drawn.text(MARGIN / width, 0.3 / height, "layers", fontsize=8, va="center")
    total = sum(exited.tokens)
    for index, (layers, tokens, colour) in enumerate(zip(exited.layers, exited.tokens, colours, strict=True)):
        left = MARGIN + 0.5 + index * step
        drawn.add_artist(Rectangle((left / width, 0.22 / height), 0.16 / width, 0.16 / height, facecolor=colour))
        share = f"{layers}  {tokens / total:.0%}"
        drawn.text((left + 0.22) / width, 0.3 / height, share, fontsize=8, va="center")


def _colours(count: int) -> list[Any]:
    """Return colours from light for few layers to dark for all."""
    from matplotlib import colormaps

    steps = [LIGHTEST + (DARKEST - LIGHTEST) * index / max(1, count - 1) for index in range(count)]
    return [colormaps["Blues"](step) for step in steps]


def _short(exited: Exited) -> str:
    return f"{exited.layers_per_token:.2f} of {plural(exited.layers[-1], 'layer')} per token"
