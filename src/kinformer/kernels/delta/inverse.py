"""Inverses of unit lower triangular matrices, many small ones at once: the R of the delta rule's blocks."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 8


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 for strictly lower triangular matrices [count, size, size], size 8 times a power of two.

    Forward substitution inside tiles of 8 on the diagonal, all tiles along the last axis, then doubling:
    the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. Faster than a batched triangular solve, and unlike
    a product of powers free of cancellation when many keys are alike.
    """
    size = lower.shape[-1]
    inverse = torch.zeros_like(lower)
    _diagonal_tiles(inverse).copy_(_substitute(_diagonal_tiles(lower).permute(1, 2, 0, 3)).permute(2, 0, 1, 3))
    half = TILE
    while half < size:
        for start in range(0, size, 2 * half):
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
            # -B' C A'
            below = torch.bmm(inverse[:, second, second], lower[:, second, first])
            inverse[:, second, first] = torch.bmm(below, inverse[:, first, first]).neg_()
        half *= 2
    return inverse


def _diagonal_tiles(matrices: Tensor) -> Tensor:
    """View the tiles on the diagonal of [count, size, size] as [count, TILE, TILE, tiles]."""
    count, size, _ = matrices.shape
    return matrices.view(count, size // TILE, TILE, size // TILE, TILE).diagonal(dim1=1, dim2=3)


def _substitute(tiles: Tensor) -> Tensor:
    """Return the inverses of tiles [TILE, TILE, ...] by forward substitution, row by row."""
    tiles = tiles.contiguous()
    inverse = torch.zeros_like(tiles)
    inverse.diagonal().fill_(1)
    for row in range(1, TILE):
        inverse[row, :row] = (tiles[row, :row, None] * inverse[:row, :row]).sum(0).neg_()
    return inverse
