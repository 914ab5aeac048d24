"""The random blocks that Big Bird's queries see (Zaheer et al. 2020): the tables that the authors' code draws.

A table is [heads, blocks, random] int32: the key blocks of every query block, -1 where there are too few to draw from.
Draws are NumPy's (Mersenne Twister), so that a seed gives what it gives in the authors' code. The first and the last
row are those of blocks that see everything, and mean nothing.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]

PAPER_LENGTHS = (1024, 2048, 3072, 4096)
"""Lengths in tokens with a plan of their own, that of the paper's experiments: it draws for the longest of them, and
from the blocks of the shortest."""


def table(blocks: int, block: int, random: int, seed: int, heads: int) -> Table:
    """Return the table for a sequence of ``blocks`` blocks of ``block`` tokens; ``seed`` is a layer's number."""
    if blocks * block in PAPER_LENGTHS:
        shortest, longest = PAPER_LENGTHS[0], PAPER_LENGTHS[-1]
        last = shortest // block - 1 if shortest > 2 * block else longest // block - 1
        return paper_plan(longest // block, last, random, seed, heads)[:, :blocks]
    rows = max(64, 1 << (blocks - 1).bit_length())  # a longer text's table begins with that of a shorter one
    return general_plan(rows, random, seed, heads)[:, :blocks]


@lru_cache(maxsize=64)
def paper_plan(blocks: int, last: int, random: int, seed: int, heads: int) -> Table:
    """Return the plan whose row i draws from the blocks 1 .. ``last`` but for i - 1, i and i + 1, one head after the
    other.

    As in the authors' code the last two rows but one leave nothing out.
    """
    state = np.random.RandomState(seed)
    drawn = np.full((heads, blocks, random), -1, np.int32)
    end = min(last, blocks - 2) + 1
    for head in range(heads):
        for row in range(1, blocks - 1):
            if row >= max(3, blocks - 3):
                pool = np.arange(1, end)
            else:
                pool = np.concatenate([np.arange(1, min(row - 1, end)), np.arange(row + 2, end)])
            result = state.permutation(pool)[:random]
            drawn[head, row, : len(result)] = result
    drawn.flags.writeable = False
    return drawn


@lru_cache(maxsize=64)
def general_plan(blocks: int, random: int, seed: int, heads: int) -> Table:
    """Return the plan whose row i draws from the blocks 1 .. 2 * random + 3 but for i - 1, i and i + 1, head by head in
    every row.

    Nor does row 1 draw block 2 * random + 3, nor row 2 * random + 3 block 1.
    """
    width = 2 * random + 5
    state = np.random.RandomState(seed)
    orders = np.array([[state.permutation(width) for _ in range(heads)] for _ in range(1, blocks)])
    rows = np.arange(1, blocks)[:, None, None]
    barred = (abs(orders - rows) <= 1) | (orders == 0) | (orders == width - 1)
    barred |= ((rows == 1) & (orders == width - 2)) | ((rows == width - 2) & (orders == 1))
    first = np.argsort(barred, axis=-1, kind="stable")[..., :random]
    drawn = np.full((heads, blocks, random), -1, np.int32)
    drawn[:, 1:] = np.take_along_axis(orders, first, axis=-1).swapaxes(0, 1)
    drawn.flags.writeable = False
    return drawn
