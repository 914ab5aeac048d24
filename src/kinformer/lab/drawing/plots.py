"""The style of all figures, and curves of losses, returns and stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kinformer.lab.evaluation.recl import THRESHOLD, Recl
from kinformer.lab.training.logging import History
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The style of all figures: matplotlib if installed, colours that colour-blind readers distinguish, PNG or SVG files.
# The colours are from Okabe and Ito (2008, Color Universal Design).

BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, QUIET, FAINT, PAPER = "#222222", "#8A8F94", "#E9EBED", "#FFFFFF"
SERIES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, INK, QUIET)
FORMATS = ("png", "svg")
DPI = 160
STYLE = {
    "font.size": 9.0, "axes.titlesize": 9.0, "axes.edgecolor": QUIET, "axes.linewidth": 0.6, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": QUIET, "ytick.color": QUIET, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "svg.hashsalt": "kinformer",
    "text.parse_math": False,  # names and tokens may hold dollar signs
}  # fmt: skip


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


def plain(axes: Axes) -> None:
    """Leave only the left and lower sides of the frame, and draw faint horizontal lines behind the curves."""
    bare(axes, "left", "bottom")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)


@contextmanager
def plot(path: Path, size: tuple[float, float], x: str, y: str, title: str = "", font: float = 8) -> Iterator[Axes]:
    """Yield the plain axes of a figure of ``size`` inches, and write it, with a legend, to ``path``."""
    with figure(*size) as drawn:
        axes = drawn.subplots()
        plain(axes)
        axes.locator_params(steps=(1, 2, 5, 10))
        yield axes
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title, loc="left")
        axes.legend(frameon=False, fontsize=font)
        drawn.tight_layout()
        save(drawn, path)


def remark(axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """Write a quiet ``text`` at a point of the data, moved by an ``offset`` in points."""
    axes.annotate(text, place, offset, textcoords="offset points", color=QUIET, fontsize=7.5, **look)


# Loss against context length and against position, as in figures 1 and 4 of Press et al. 2022 (ALiBi).

Points = tuple[tuple[int, float], ...]
Stroke = Literal["solid", "dashed", "dotted"]

HEADROOM = 0.4
STROKES: dict[Stroke, str | tuple[float, tuple[float, ...]]] = {
    "solid": "-", "dashed": (0, (4, 1.6)), "dotted": (0, (1, 1.4)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The curve of one model: bits per byte at each context length, and by position, the last of its bin, in the
    longest window. ``trained`` is the training length. Without a ``colour`` the curve gets the next colour of the
    series."""

    name: str
    trained: int | None
    lengths: Points
    positions: Points
    colour: str | None = None
    stroke: Stroke = "solid"


def plot_lengths(curves: Sequence[Curve], path: Path) -> None:
    """Draw both pictures side by side; values far above the range are cut off. ``path`` ends in .png or .svg."""
    with figure(11.0, 4.7) as drawn:
        left, right = drawn.subplots(1, 2)
        colours = [curve.colour or SERIES[index % len(SERIES)] for index, curve in enumerate(curves)]
        _panel(left, curves, [curve.lengths for curve in curves], colours)
        left.set_xlabel("context length (tokens, non-overlapping windows)")
        left.set_ylabel("bits per byte")
        _panel(right, curves, [curve.positions for curve in curves], colours)
        right.set_xlabel("position in the longest window (tokens before, up to)")
        drawn.tight_layout(w_pad=2.0)
        save(drawn, path)


def _panel(axes: Axes, curves: Sequence[Curve], lines: Sequence[Points], colours: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    plain(axes)
    low, high = _range(curves, lines)
    for one, points, colour in zip(curves, lines, colours, strict=True):
        stroke = STROKES[one.stroke]
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=3, color=colour, linewidth=1.6, linestyle=stroke,
            label=one.name,
        )  # fmt: skip
    trained = {curve.trained for curve in curves if curve.trained}
    for length in trained:
        axes.axvline(length, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if len(trained) == 1:
        remark(axes, "training length", (trained.pop(), high), (-2, -2), rotation=90, va="top", ha="right")
    axes.set_ylim(low, high)
    ticks = sorted({x for points in lines for x, _ in points})
    shown = ticks[:: -(-len(ticks) // 9)]
    axes.set_xticks(shown, [str(tick) for tick in shown])
    axes.minorticks_off()
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)


def _range(curves: Sequence[Curve], lines: Sequence[Points]) -> tuple[float, float]:
    """Return the range of the vertical axis: from the best value to a margin above the values at training length."""
    values = [y for points in lines for _, y in points]
    within = [y for one, points in zip(curves, lines, strict=True) for x, y in points if x == one.trained]
    low, high = min(values), max(values)
    if within:
        high = min(high, max(within) * (1 + HEADROOM))
    margin = 0.04 * ((high - low) or 1.0)
    return low - margin, high + margin


def plot_history(history: History, title: str, path: Path) -> None:
    """Draw a run's curve of training, smoothed, and its validations."""
    named = ((history.training, BLUE, "", "training, smoothed"), (history.validation, RED, "o", "validation"))
    with plot(path, (6.4, 4.0), "steps", history.unit, title) as axes:
        for points, colour, marker, name in named:
            if points:
                look = {"marker": marker, "markersize": 3, "linewidth": 1.4}
                axes.plot(*zip(*points, strict=True), color=colour, label=name, **look)
        axes.set_ylim(*history.range)


# Returns against target returns, as in figure 4 of Chen et al. 2021.


def plot_returns(
    rows: Sequence[Mapping[str, Any]], clone: Mapping[str, Any] | None, best: float, title: str, path: Path
) -> None:
    """Draw ``rows`` as points, and the best return of the data and the mean of cloned behaviour as lines. A row has the
    ``mean`` return of episodes that aim at ``target``, and half the width of its ``confidence`` interval; a ``target``
    of None aims at the best return, whose mean is ``optimal``."""
    points = sorted((row["optimal"] if row["target"] is None else row["target"], row) for row in rows)
    with plot(path, (5.4, 4.2), "return asked for", "return (mean, 95 % confidence)", title, 9) as axes:
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


# The relative gain of each step to a longer context, which defines the relative effective context length.


def plot_effective_context(names: Sequence[str], contexts: Sequence[int], curves: Sequence[Recl], path: Path) -> None:
    """Draw the gain in percent of perplexity against the context after a step, one line for each model."""
    with plot(path, (6.4, 4.0), "context (tokens)", "gain over one step shorter (% of perplexity)") as axes:
        axes.axhline(100 * THRESHOLD, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)))
        remark(axes, "least gain that counts", (contexts[-1], 100 * THRESHOLD), (0, 2), ha="right", va="bottom")
        for index, (name, curve) in enumerate(zip(names, curves, strict=True)):
            gains, colour = [100 * gain for gain in curve.gains], SERIES[index % len(SERIES)]
            label = f"{name}: RECL {'at least ' if curve.at_least else ''}{curve.length}"
            axes.plot(contexts[1:], gains, color=colour, linewidth=1.6, marker="o", markersize=3, label=label)


# Bits per byte against the weight and the size of a datastore (Khandelwal et al. 2020, figures 4 and 5).

StorePoints = Sequence[tuple[float, float]]


def plot_datastore(alone: float, weights: StorePoints, sizes: StorePoints, path: Path) -> None:
    """Draw both curves; ``alone`` is the model's metric without a datastore. ``sizes`` may be empty."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    with figure(10.0 if sizes else 5.2, 3.8) as drawn:
        panels = drawn.subplots(1, 2 if sizes else 1, squeeze=False)[0]
        _store_panel(panels[0], alone, weights, BLUE)
        panels[0].set_xlabel("weight of the store")
        panels[0].set_ylabel("bits per byte")
        if sizes:
            _store_panel(panels[1], alone, sizes, RED)
            panels[1].set_xscale("log")
            panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
            panels[1].xaxis.set_minor_formatter(NullFormatter())
            panels[1].set_xlabel("entries in the store")
        drawn.tight_layout(w_pad=2.0)
        save(drawn, path)


def _store_panel(axes: Axes, alone: float, points: StorePoints, colour: str) -> None:
    plain(axes)
    axes.axhline(alone, color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, marker="o", markersize=3)
    remark(axes, "the model alone", (points[0][0], alone), (4, 2), ha="left", va="bottom")
