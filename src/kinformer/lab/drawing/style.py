"""The style of all figures: matplotlib if installed, colours that colour-blind readers distinguish, PNG or SVG files.

The colours are from Okabe and Ito (2008, Color Universal Design).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, QUIET, FAINT, PAPER = "#222222", "#8A8F94", "#E9EBED", "#FFFFFF"
SERIES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, INK, QUIET)
FORMATS = ("png", "svg")
DPI = 160
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.6,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.hashsalt": "kinformer",
    "text.parse_math": False,  # names and tokens may hold dollar signs
}


def check(path: Path) -> str:
    """Return the format of ``path`` by its ending, "png" or "svg"; raise ``KinformerError`` without matplotlib."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise KinformerError(f"{path}: a figure's name ends in .png or .svg, but this one in {path.suffix!r}.")
    if path.is_dir():
        raise KinformerError(f"{path}: is a folder; give the name of a file.")
    if find_spec("matplotlib") is None:
        raise KinformerError("figures need matplotlib, which is not installed; pip install 'kinformer[plot]' gets it.")
    return ending


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of ``width`` x ``height`` inches; the style holds within the context."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        yield Figure(figsize=(width, height), facecolor=PAPER)


def save(drawn: Figure, path: Path) -> None:
    """Write a figure atomically in the format of its ending; equal figures give equal bytes."""
    ending = check(path)
    metadata = {"Date": None} if ending == "svg" else {"Software": None}
    write_atomic(path, lambda target: drawn.savefig(target, format=ending, dpi=DPI, metadata=metadata))


def bare(axes: Axes, *sides: str) -> None:
    """Hide all sides of the frame except ``sides``."""
    for name, spine in axes.spines.items():
        spine.set_visible(name in sides)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return ``heights``, moved so that neighbours are at least ``gap`` apart in the same order.

    This places the labels at the ends of curves.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    groups: list[tuple[list[int], float]] = []
    for index in order:
        groups.append(([index], heights[index]))
        while len(groups) > 1 and _low(groups[-1], gap) < _high(groups[-2], gap) + gap:
            (upper, above), (lower, below) = groups.pop(), groups.pop()
            count = len(lower) + len(upper)
            groups.append((lower + upper, (below * len(lower) + above * len(upper)) / count))
    placed = [0.0] * len(heights)
    for group in groups:
        for rank, index in enumerate(group[0]):
            placed[index] = _low(group, gap) + rank * gap
    return placed


def _low(group: tuple[list[int], float], gap: float) -> float:
    members, centre = group
    return centre - gap * (len(members) - 1) / 2


def _high(group: tuple[list[int], float], gap: float) -> float:
    members, centre = group
    return centre + gap * (len(members) - 1) / 2
