"""Text coloured token by token, patterns as characters, and the page of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn

from kinformer.core.pattern import Pattern
from kinformer.lab.drawing.panels import FullSequence, global_token_words, in_text
from kinformer.lab.drawing.style import INK, PAPER, QUIET, figure, save
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# A text coloured token by token: by how many layers predicted it, or by the bucket that it is in.

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


# A softmax pattern as a small picture in text: row i is a query, column j a key, a filled cell one that it sees.

CELLS = 16
MOST_TOKENS = 256
SEEN, UNSEEN = "■", "·"


class TextPicture(TypedDict):
    """The picture of a ``pattern``, by its name: ``rows`` of cells, of which each stands for ``tokens_per_cell``."""

    pattern: str
    tokens_per_cell: int
    rows: list[str]


def draw(pattern: Pattern, tokens_per_cell: int = 1, cells: int = CELLS) -> list[str]:
    """Return ``cells`` lines: whether the last query of each cell's tokens sees any key of the other cell."""
    index = torch.arange(cells * tokens_per_cell)
    pattern = pattern.sized(len(index))
    last = index[tokens_per_cell - 1 :: tokens_per_cell]
    seen = pattern.allowed(last[:, None], index[None]).view(cells, cells, tokens_per_cell).any(dim=-1)
    return [" ".join(SEEN if cell else UNSEEN for cell in row) for row in seen.tolist()]


def scale(pattern: Pattern, cells: int = CELLS) -> int:
    """Return the tokens per cell at which the window of ``pattern`` fills about a third
    of the picture, or something is unseen."""
    if pattern.behind is not None:
        return max(1, 3 * pattern.behind // cells)
    powers = (2**power for power in range(MOST_TOKENS.bit_length()))
    return next((tokens for tokens in powers if any(UNSEEN in row for row in draw(pattern, tokens, cells))), 1)


def pictures(model: nn.Module) -> list[TextPicture]:
    """Return each different pattern of the model's mixers and their heads, in order: its name, scale and lines."""
    pictures_by_name: dict[tuple[str, ...], TextPicture] = {}
    for pattern in _patterns(model):
        cell = scale(pattern)
        rows = draw(pattern, cell)
        name = _name(pattern)
        pictures_by_name.setdefault((name, str(cell), *rows), {"pattern": name, "tokens_per_cell": cell, "rows": rows})
    return list(pictures_by_name.values())


def _patterns(model: nn.Module) -> Iterator[Pattern]:
    for module in model.modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, Pattern):
            in_model = in_text(pattern, getattr(model, "config", None))
            yield from (in_model.at(head) for head in range(in_model.num_heads or 1))


def _name(pattern: Pattern) -> str:
    if isinstance(pattern, FullSequence):
        return f"{_name(pattern.inner)}, {global_token_words(pattern)}"
    return getattr(pattern, "name", type(pattern).__name__.lower())


# Attention over a text as one interactive page that holds all that it needs (in the manner of BertViz, Vig 2019).

ASSETS = Path(__file__).parent / "assets"


def trace_page(title: str, data: dict[str, object]) -> str:
    """Return the page of ``data``: ``readings`` (name, tokens, exits, steps) and ``places`` (place, mixer, reading,
    heads, keys, queries, count, note, implied, buckets, spans and the weights, base64 of deflated int16 [heads,
    queries, count] times ``unit``). All text in it may be a stranger's and is escaped.

    Errors: ``KinformerError`` where jinja2 is missing.
    """
    if find_spec("jinja2") is None:
        raise KinformerError("pages need jinja2, which is not installed; pip install 'kinformer[plot]' gets it.")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    # "<" inside a script would let a token end it.
    embedded = Markup(json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))  # noqa: S704
    read = {name: Markup((ASSETS / f"trace.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}  # noqa: S704
    return environment.get_template("trace.html").render(
        title=title, style=read["css"], script=read["js"], data=embedded
    )
