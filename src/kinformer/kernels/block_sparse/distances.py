"""What distances do to the scores and outputs of one tile, with the gradients of the tables.

Views of a tile here are [rows, heads, classes, group, queries, keys]: batch rows, key heads, classes of a stride,
query heads of a key head. With d = slot of the query - slot of the key,

    S <- max(0, S) * factor[d],   S <- S + q . keys[d] + bias[d],   O <- O + sum P values[d]

for those tables that there are. Tables are [heads or 1, group or 1, n] or [..., n, head_dim] by unit distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.parts import Relative
from kinformer.kernels.block_sparse.tile import Tile

TABLES = ("bias", "factor", "keys", "values")


class Overlap(NamedTuple):
    """The tile's keys ``start .. stop`` for which a table has distances, from ``first`` on in the padded table."""

    start: int
    stop: int
    first: int


class Distances:
    """The tables of a section's heads at distances 0, stride, 2 stride, ...; ``rows`` queries are in a tile at most.

    A backward collects the gradients of those that are ``learned``.
    """

    def __init__(
        self, relative: Relative, stride: int, rows: int, accumulator: torch.dtype, learned: Sequence[str] = ()
    ) -> None:
        self.pad, self.accumulator, self.learned = rows, accumulator, learned
        self.lowest = -(-relative.lowest // stride)
        skip = self.lowest * stride - relative.lowest
        self.tables: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        for name in TABLES:
            table = getattr(relative, name)
            if table is not None:
                wide = name in ("keys", "values")
                table = table[:, :, skip::stride]
                self.count = table.shape[2]
                self.tables[name] = functional.pad(table, (0, 0) * wide + (rows, rows))

    def gradient(self, name: str, n: int, lowest: int, stride: int) -> Tensor:
        """The gradient of the table ``name`` by distance, ``n`` of them from ``lowest``."""
        inner = self._collected(name)[:, :, self.pad : self.pad + self.count]
        whole = inner.new_zeros(*inner.shape[:2], n, *inner.shape[3:])
        whole[:, :, self.lowest * stride - lowest :: stride] = inner
        return whole

    def bias_alone(self, tiles: Sequence[Tile]) -> Tensor | None:
        """The biases of the distances 0, 1, ..., if there is no other table and every key of the tiles has one."""
        spans = (run.ahead + tile.last - tile.first + run.stop - run.start - 1 for tile in tiles for run in tile.runs)
        if set(self.tables) != {"bias"} or self.lowest > 0 or max(spans, default=0) > self.lowest + self.count:
            return None
        return self.tables["bias"][:, :, self.pad - self.lowest : self.pad + self.count]

    def overlaps(self, tile: Tile) -> list[Overlap]:
        """Where the tile's runs of neighbouring keys meet distances of the tables."""
        rows, found = tile.last - tile.first, []
        for run in tile.runs:
            start = max(0, self.lowest - run.ahead - rows + 1)
            stop = min(run.stop - run.start, self.lowest + self.count - run.ahead)
            if start < stop:
                first = run.ahead + start - self.lowest + self.pad
                found.append(Overlap(run.start + start, run.start + stop, first))
        return found

    def _slice(self, name: str, heads: slice, overlap: Overlap, rows: int) -> Tensor:
        table = self.tables[name]
        return table[self._heads(name, heads), :, self._distances(overlap, rows)]

    def _heads(self, name: str, heads: slice) -> slice:
        return heads if self.tables[name].shape[0] > 1 else slice(None)

    def _distances(self, overlap: Overlap, rows: int) -> slice:
        return slice(overlap.first, overlap.first + rows + overlap.stop - overlap.start - 1)

    def _gradient(self, name: str, heads: slice, overlap: Overlap, rows: int) -> Tensor:
        return self._collected(name)[self._heads(name, heads), :, self._distances(overlap, rows)]

    def _collected(self, name: str) -> Tensor:
        """The gradient so far; a forward asks for none."""
        if name not in self.gradients:
            self.gradients[name] = torch.zeros_like(self.tables[name], dtype=self.accumulator)
        return self.gradients[name]

    def add(self, scores: Tensor, q: Tensor, tile: Tile, heads: slice) -> Tensor | None:
        """Change ``scores`` in place; returns what the factor multiplied, which its gradient needs."""
        rows, overlaps = scores.shape[-2], self.overlaps(tile)
        rectified = None
        if "factor" in self.tables:
            rectified = scores.relu_().clone()
            for overlap in overlaps:
                view = toeplitz(self._slice("factor", heads, overlap, rows), overlap.stop - overlap.start)
                scores[..., overlap.start : overlap.stop].mul_(view.unsqueeze(1))
        for overlap in overlaps:
            width = overlap.stop - overlap.start
            part = scores[..., overlap.start : overlap.stop]
            if "keys" in self.tables:
                products = _spread(q, self._slice("keys", heads, overlap, rows))
                part.add_(skew(products.flatten(0, 3), width).view(part.shape))
            if "bias" in self.tables:
                part.add_(toeplitz(self._slice("bias", heads, overlap, rows), width).unsqueeze(1))
        return rectified

    def add_gradients(
        self, errors: Tensor, q: Tensor, dq: Tensor, rectified: Tensor | None, tile: Tile, heads: slice
    ) -> None:
        """Collect the tables' gradients, add to ``dq`` and turn ``errors`` into those of the plain scores."""
        rows = errors.shape[-2]
        for overlap in self.overlaps(tile):
            part = errors[..., overlap.start : overlap.stop]
            if "bias" in self.tables and "bias" in self.learned:
                self._collect("bias", part, heads, overlap)
            if "keys" in self.tables:
                far = unskew(part).to(q.dtype)
                dq.add_(_mix(far, self._slice("keys", heads, overlap, rows)))
                _outer(far, q, self._gradient("keys", heads, overlap, rows))
            if rectified is not None:
                if "factor" in self.learned:
                    self._collect("factor", part * rectified[..., overlap.start : overlap.stop], heads, overlap)
                view = toeplitz(self._slice("factor", heads, overlap, rows), overlap.stop - overlap.start)
                part.mul_(view.unsqueeze(1))
        if rectified is not None:
            errors.masked_fill_(rectified <= 0, 0)

    def _collect(self, name: str, errors: Tensor, heads: slice, overlap: Overlap) -> None:
        sums = antidiagonal_sums(errors.sum((0, 2)))
        target = self._gradient(name, heads, overlap, errors.shape[-2])
        target += sums.sum_to_size(target.shape)

    def add_values(self, out: Tensor, weights: Tensor, tile: Tile, heads: slice) -> None:
        """out [rows, heads, classes, group, queries, head_dim] += weights * values."""
        if "values" in self.tables:
            for overlap in self.overlaps(tile):
                table = self._slice("values", heads, overlap, weights.shape[-2])
                out.add_(_mix(unskew(weights[..., overlap.start : overlap.stop]).to(table.dtype), table))

    def add_value_gradients(self, errors: Tensor, weights: Tensor, grad: Tensor, tile: Tile, heads: slice) -> None:
        """Gradients of ``values``, and of the weights in ``errors``, from that of the output."""
        if "values" in self.tables:
            rows = weights.shape[-2]
            for overlap in self.overlaps(tile):
                part = errors[..., overlap.start : overlap.stop]
                products = _spread(grad, self._slice("values", heads, overlap, rows))
                part.add_(skew(products.flatten(0, 3), overlap.stop - overlap.start).view(part.shape))
                far = unskew(weights[..., overlap.start : overlap.stop]).to(grad.dtype)
                _outer(far, grad, self._gradient("values", heads, overlap, rows))


def _spread(x: Tensor, table: Tensor) -> Tensor:
    """x [r, h, c, g, rows, d] times table [h or 1, g or 1, n, d]: [r, h, c, g, rows, n]."""
    if table.shape[:2] == (1, 1):
        return (x.reshape(-1, x.shape[-1]) @ table[0, 0].mT).view(*x.shape[:-1], -1)
    return torch.matmul(x, table.unsqueeze(1).mT)


def _mix(far: Tensor, table: Tensor) -> Tensor:
    """far [r, h, c, g, rows, n] times table [h or 1, g or 1, n, d]: [r, h, c, g, rows, d]."""
    if table.shape[:2] == (1, 1):
        return (far.reshape(-1, far.shape[-1]) @ table[0, 0]).view(*far.shape[:-1], -1)
    return torch.matmul(far, table.unsqueeze(1))


def _outer(far: Tensor, x: Tensor, gradient: Tensor) -> None:
    """gradient [h or 1, g or 1, n, d] += far^T x, summed over all that the table is shared by."""
    if gradient.shape[:2] == (1, 1):
        gradient[0, 0] += far.reshape(-1, far.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
    else:
        gradient += torch.matmul(far.mT, x).sum((0, 2)).sum_to_size(gradient.shape)


# Between distances and pairs: a tile's element (i, j) stands at distance d0 + i + j when its keys are newest first.
# Views and one strided write do it, in time linear in the tile: the "relative shift" of Transformer-XL (Dai et al.
# 2019, appendix B) and its transpose.


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
