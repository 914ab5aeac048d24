"""Between distances and pairs: a tile's element (i, j) stands at distance d0 + i + j when its keys are newest first.

Views and one strided write do it, in time linear in the tile: the "relative shift" of Transformer-XL (Dai et al. 2019,
appendix B) and its transpose.
"""

from __future__ import annotations

from torch import Tensor


def toeplitz(table: Tensor, width: int) -> Tensor:
    """[..., rows + width - 1] -> [..., rows, width] with element (i, j) = table[i + j]; a view."""
    return table.unfold(-1, width, 1)


def antidiagonal_sums(x: Tensor) -> Tensor:
    """[..., rows, width] -> [..., rows + width - 1]: sums over i + j, the transpose of :func:`toeplitz`."""
    return unskew(x).sum(-2)


def skew(x: Tensor, width: int) -> Tensor:
    """[n, rows, rows + width - 1] -> [n, rows, width] with element (i, j) = x[i, i + j]; a view of a dense tensor."""
    n, rows, span = x.shape
    return x.as_strided((n, rows, width), (rows * span, span + 1, 1), x.storage_offset())


def unskew(x: Tensor) -> Tensor:
    """[..., rows, width] -> [..., rows, rows + width - 1] with element (i, i + j) = x[i, j], else 0."""
    *shape, rows, width = x.shape
    span = rows + width - 1
    out = x.new_zeros(*shape, rows, span)
    flat = out.view(-1, rows, span)
    flat.as_strided((flat.shape[0], rows, width), (rows * span, span + 1, 1)).copy_(x.reshape(-1, rows, width))
    return out
