"""Units of a text, for which an encoder's global input has a token each (Ainslie et al. 2020, ETC): here its lines."""

from __future__ import annotations

import numpy as np

from kinformer.core.errors import KinformerError


def line_units(tokens: np.ndarray, longest: int = 64, newline: int = 10) -> np.ndarray:
    """The unit of every token, counted from 0 in each row: int64 [rows, time], for ``model(tokens, units=...)``.

    A unit is as many lines as go into ``longest`` tokens, each with the ``newline`` that ends it; a line that is longer
    is cut. Units tell where lines end, so take them from a text in which ends of lines are not to be guessed.
    """
    if longest < 1:
        raise KinformerError(f"longest must be 1 token or more a unit, but is {longest}.")
    units = np.zeros(tokens.shape, np.int64)
    for row, text in zip(units, tokens, strict=True):
        ends = np.append(np.flatnonzero(text == newline) + 1, len(text))
        start = 0
        while start < len(text):
            reach = min(start + longest, len(text))
            fitting = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, reach, side="right")]
            start = int(fitting[-1]) if len(fitting) else reach
            row[start:] += 1
    return units
