"""An image beside a model's attention to it: heat over the image, or the windows within which patches attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kinformer.lab.drawing.style import ORANGE, PAPER, bare, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, SIZE, GAP, MARGIN, TOP, HEAD = 4, 2.4, 0.62, 0.3, 0.42, 0.5
"""Panels in a line; inches: a panel, the space after it, around, for the title, over a panel."""
COVER = 0.6


@dataclass(frozen=True, kw_only=True)
class HeatOver:
    """The heat ``values`` [rows, columns], one for each patch of ``patch`` x ``patch`` pixels; 1 is the mean."""

    name: str
    values: NDArray[np.float64]
    patch: int


@dataclass(frozen=True, kw_only=True)
class WindowsOver:
    """The windows of ``side`` x ``side`` patches of ``patch`` pixels on a side,
    which begin ``shift`` patches further."""

    name: str
    patch: int
    side: int
    shift: int

    def lines(self, pixels: int) -> list[int]:
        """Return where windows meet along a side of this many ``pixels``."""
        step, first = self.side * self.patch, self.shift * self.patch
        return list(range(first or step, pixels, step))


@dataclass(frozen=True, kw_only=True)
class ImageDrawing:
    """The image ``pixels`` uint8 [height, width, 1 or 3], and the layers drawn over it."""

    title: str
    pixels: NDArray[np.uint8]
    panels: Sequence[HeatOver | WindowsOver]


def draw_image(drawing: ImageDrawing, path: Path) -> None:
    """Draw the image, then a panel for each item drawn over it; PNG or SVG by the ending of ``path``."""
    count = 1 + len(drawing.panels)
    columns = min(COLUMNS, count)
    rows = ceil(count / columns)
    tall = SIZE * min(2.0, drawing.pixels.shape[0] / drawing.pixels.shape[1])
    width, height = 2 * MARGIN + columns * (SIZE + GAP), TOP + rows * (tall + HEAD) + MARGIN / 2
    with figure(width, height) as drawn:
        for index, panel in enumerate((None, *drawing.panels)):
            row, column = divmod(index, columns)
            left, bottom = MARGIN + column * (SIZE + GAP), height - TOP - (row + 1) * (tall + HEAD)
            axes = drawn.add_axes((left / width, bottom / height, SIZE / width, tall / height))
            _paint(axes, drawing.pixels, panel)
        heading = shorten(drawing.title, 8 + 28 * columns, placeholder=" ...")
        drawn.text(MARGIN / width, 1 - 0.24 / height, heading, fontsize=11, fontweight="bold", va="center")
        save(drawn, path)


def _paint(axes: Axes, pixels: NDArray[np.uint8], panel: HeatOver | WindowsOver | None) -> None:
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
        bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=7)
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
