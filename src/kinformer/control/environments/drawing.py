"""Drawing for the library's environments: cells of one size, and lines."""

from __future__ import annotations

import numpy as np

PIXELS = 24
"""The pixels of a cell's side."""
Colour = tuple[int, int, int]
PAPER, LINE, INK = (255, 255, 255), (225, 228, 230), (70, 75, 80)
AGENT, KEY, DOOR, WRONG = (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0)


def grid(rows: int, columns: int) -> np.ndarray:
    """Return an empty picture of this many cells, [height, width, 3] uint8."""
    return np.full((rows * PIXELS, columns * PIXELS, 3), PAPER, np.uint8)


def fill(picture: np.ndarray, cell: np.ndarray | tuple[int, int], colour: Colour, margin: int = 2) -> None:
    """Colour a cell, given by row and column, except for its ``margin``."""
    top, left = np.asarray(cell) * PIXELS
    picture[top + margin : top + PIXELS - margin + 1, left + margin : left + PIXELS - margin + 1] = colour


def stroke(picture: np.ndarray, start: np.ndarray, end: np.ndarray, colour: Colour, width: int) -> None:
    """Draw a line from one point (row, column) to another; what lies outside of the picture is left out."""
    points = np.linspace(start, end, 2 * int(np.abs(end - start).max()) + 2).round().astype(int)
    around = np.array([*np.ndindex(width, width)]) - width // 2
    rows, columns = (points[:, None] + around).reshape(-1, 2).T
    inside = (rows >= 0) & (rows < picture.shape[0]) & (columns >= 0) & (columns < picture.shape[1])
    picture[rows[inside], columns[inside]] = colour
