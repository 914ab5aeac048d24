"""The scores of one tile: forms of a score, tables by distance, and distances that rounding removes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.parts import Relative
from kinformer.kernels.block_sparse.plan import Tile
from kinformer.kernels.softmax import EPS, accumulate, complex_queries

# The forms of a score: how a tile's products of queries and keys become scores, with their gradients.
#
#     S = form(Q, K) -> (dQ, dK) from dS;   S is ``scores``, dS ``errors``
#
# q [n, rows, head_dim], k [n, keys, head_dim], scores [n, rows, keys]. A form stores what its ``backward`` needs from
# the last ``forward``; ``backward`` may overwrite its ``errors``.

_ELEMENTS = 1 << 21


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute left @ right into ``out``. Inputs of lower precision are not widened, as a CPU product cannot do that."""
    if out.dtype == left.dtype:
        return torch.bmm(left, right, out=out)
    return out.copy_(torch.bmm(left, right))


class Form:
    """A score of queries and keys before distances come in, and its gradient."""

    def enter(self, shape: tuple[int, ...], heads: slice) -> None:
        """Announce the next tile, [rows, heads, classes, group, queries, keys]; ``heads`` are its heads."""

    def forward(self, q: Tensor, kt: Tensor, out: Tensor) -> Tensor:
        """Return the scores, written to ``out``; ``kt`` is k transposed."""
        raise NotImplementedError

    def backward(self, errors: Tensor, q: Tensor, k: Tensor, dk: Tensor) -> Tensor:
        """Return the gradient of q, given the gradient of the scores, and add the gradient of k to ``dk``."""
        raise NotImplementedError


class DotForm(Form):
    """The dot product q . k, whose scale is in q already."""

    def forward(self, q: Tensor, kt: Tensor, out: Tensor) -> Tensor:
        return product(q, kt, out)

    def backward(self, errors: Tensor, q: Tensor, k: Tensor, dk: Tensor) -> Tensor:
        errors = errors.to(q.dtype)
        accumulate(dk, errors.mT, q)
        return torch.bmm(errors, k)


class CappedForm(Form):
    """The capped product scale * tanh(q . k)."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, kt: Tensor, out: Tensor) -> Tensor:
        scores = product(q, kt, out).tanh_().mul_(self.scale)
        self.tanh = scores / self.scale
        return scores

    def backward(self, errors: Tensor, q: Tensor, k: Tensor, dk: Tensor) -> Tensor:
        # tanh' = 1 - tanh^2
        errors = errors.mul_(self.tanh.square_().neg_().add_(1).mul_(self.scale)).to(q.dtype)
        accumulate(dk, errors.mT, q)
        return torch.bmm(errors, k)


class ModulusForm(Form):
    """The modulus scale * |q k| of complex numbers, first half real, second half imaginary."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, kt: Tensor, out: Tensor) -> Tensor:
        self.parts = [product(part, kt, torch.empty_like(out)) for part in complex_queries(q)]
        torch.mul(self.parts[0], self.parts[0], out=out)
        self.size = out.addcmul_(self.parts[1], self.parts[1]).add_(EPS).sqrt_().clone()
        return out.mul_(self.scale)

    def backward(self, errors: Tensor, q: Tensor, k: Tensor, dk: Tensor) -> Tensor:
        # d|z| = (re d re + im d im) / |z|, with |z| the root that EPS keeps above 0.
        errors.div_(self.size).mul_(self.scale)
        real, imaginary = (part.mul_(errors).to(q.dtype) for part in self.parts)
        left, right = complex_queries(q)
        accumulate(dk, real.mT, left)
        accumulate(dk, imaginary.mT, right)
        (a, b), (c, d) = (torch.bmm(part, k).chunk(2, -1) for part in (real, imaginary))
        return torch.cat([a + d, c - b], -1)


class AdditiveForm(Form):
    """The additive score vector . tanh(q + k), some keys at a time; ``vector`` [heads, group, head_dim]."""

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.gradient = torch.zeros_like(vector)

    def enter(self, shape: tuple[int, ...], heads: slice) -> None:
        rows, count, classes, group, queries, _ = shape
        width = self.vector.shape[-1]
        self.heads, self.shape = heads, (rows, count, classes, group, queries, width)
        spread = self.vector[heads][None, :, None, :, None].expand(self.shape)
        self.row_vectors = spread.reshape(-1, group * queries, 1, width)

    def _tanh(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor]]:
        # tanh(q + k) has head_dim numbers a pair: a block of keys at a time keeps it in the cache.
        step = max(1, _ELEMENTS // q.numel())
        for start in range(0, k.shape[1], step):
            block = slice(start, start + step)
            yield block, (q[:, :, None] + k[:, None, block]).to(self.vector.dtype).tanh_()

    def forward(self, q: Tensor, kt: Tensor, out: Tensor) -> Tensor:
        for block, tanh in self._tanh(q, kt.mT):
            out[..., block] = (tanh * self.row_vectors).sum(-1)
        return out

    def backward(self, errors: Tensor, q: Tensor, k: Tensor, dk: Tensor) -> Tensor:
        dq = torch.zeros_like(q, dtype=errors.dtype)
        for block, tanh in self._tanh(q, k):
            error = errors[..., block, None]
            self.gradient[self.heads] += (tanh * error).sum(2).view(self.shape).sum((0, 2, 4))
            # tanh' = 1 - tanh^2
            inner = tanh.square_().neg_().add_(1).mul_(self.row_vectors).mul_(error)
            dq += inner.sum(2)
            dk[:, block] += inner.sum(1)
        return dq


def form_of(name: str, vector: Tensor | None, scale: float) -> Form:
    """Return the form called ``name``."""
    if name == "additive":
        assert vector is not None
        return AdditiveForm(vector)
    if name == "capped":
        return CappedForm(scale)
    return ModulusForm(scale) if name == "modulus" else DotForm()


# Tables by distance in the scores and outputs of one tile, and the tables' gradients.
#
# Views of a tile here are [rows, heads, classes, group, queries, keys]: batch rows, key heads, classes of a stride,
# query heads of a key head. With d = slot of the query - slot of the key,
#
#     S <- max(0, S) * factor[d],   S <- S + q . keys[d] + bias[d],   O <- O + sum P values[d]
#
# for those tables that there are. Tables are [heads or 1, group or 1, n] or [..., n, head_dim] by unit distance.

TABLES = ("bias", "factor", "keys", "values")

_ALIGNED = 16  # numbers in a row of a product are a multiple of it


class Overlap(NamedTuple):
    """The tile's keys ``start .. stop`` whose distances a table has, from ``first`` on in the padded table."""

    start: int
    stop: int
    first: int


class Distances:
    """The tables of a section's heads at distances 0, stride, 2 stride, ...; a tile has at most ``rows`` queries.

    A backward collects the gradients of the ``learned`` tables.
    """

    def __init__(
        self, relative: Relative, stride: int, rows: int, accumulator: torch.dtype, learned: Sequence[str] = ()
    ) -> None:
        self.pad, self.accumulator, self.learned = rows, accumulator, learned
        self.scratch: dict[str, Tensor] = {}
        self.rectified: Tensor | None = None
        self.lowest = -(-relative.lowest // stride)
        skip = self.lowest * stride - relative.lowest
        self.tables: dict[str, Tensor] = {}
        self.across: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        for name in TABLES:
            table = getattr(relative, name)
            if table is not None:
                wide = name in ("keys", "values")
                table = table[:, :, skip::stride]
                self.count = table.shape[2]
                # Zeros on both sides: distances outside the table then add nothing, without a mask.
                self.tables[name] = functional.pad(table, (0, 0) * wide + (rows, rows + _ALIGNED))
                if wide:  # its columns are neighbours: a CPU's products read rows of the right side
                    self.across[name] = self.tables[name].mT.contiguous()

    def gradient(self, name: str, n: int, lowest: int, stride: int) -> Tensor:
        """Return the gradient of the table ``name`` for ``n`` distances from ``lowest``."""
        inner = self._collected(name)[:, :, self.pad : self.pad + self.count]
        whole = inner.new_zeros(*inner.shape[:2], n, *inner.shape[3:])
        whole[:, :, self.lowest * stride - lowest :: stride] = inner
        return whole

    def bias_alone(self, tiles: Sequence[Tile]) -> Tensor | None:
        """Return the biases of the distances 0, 1, ..., or None if another table exists or distances are missing."""
        spans = (run.ahead + tile.last - tile.first + run.stop - run.start - 1 for tile in tiles for run in tile.runs)
        if set(self.tables) != {"bias"} or self.lowest > 0 or max(spans, default=0) > self.lowest + self.count:
            return None
        return self.tables["bias"][:, :, self.pad - self.lowest : self.pad + self.count]

    def overlaps(self, tile: Tile) -> list[Overlap]:
        """Return where the tile's runs of neighbouring keys meet distances of the tables."""
        rows, result = tile.last - tile.first, []
        for run in tile.runs:
            start = max(0, self.lowest - run.ahead - rows + 1)
            stop = min(run.stop - run.start, self.lowest + self.count - run.ahead)
            if start < stop:
                first = run.ahead + start - self.lowest + self.pad
                result.append(Overlap(run.start + start, run.start + stop, first))
        return result

    def _slice(self, name: str, heads: slice, overlap: Overlap, rows: int) -> Tensor:
        return self.tables[name][self._heads(name, heads), :, self._distances(overlap, rows)]

    def _toeplitz(self, name: str, heads: slice, overlap: Overlap, rows: int) -> Tensor:
        """Return a view [h or 1, 1, g or 1, rows, width] with element (i, j) = table[i + j]."""
        table = self._slice(name, heads, overlap, rows)
        return table.unfold(-1, overlap.stop - overlap.start, 1)[:, None, :, :rows]

    def _heads(self, name: str, heads: slice) -> slice:
        return heads if self.tables[name].shape[0] > 1 else slice(None)

    def _distances(self, overlap: Overlap, rows: int) -> slice:
        """Return the slice of distances at which the tile's pairs stand, a little longer for alignment."""
        return slice(overlap.first, overlap.first + aligned(rows + overlap.stop - overlap.start - 1))

    def _gradient(self, name: str, heads: slice, overlap: Overlap, rows: int) -> Tensor:
        return self._collected(name)[self._heads(name, heads), :, self._distances(overlap, rows)]

    def _collected(self, name: str) -> Tensor:
        """Return the gradient collected so far; a forward never calls this."""
        if name not in self.gradients:
            self.gradients[name] = torch.zeros_like(self.tables[name], dtype=self.accumulator)
        return self.gradients[name]

    def add(self, scores: Tensor, q: Tensor, tile: Tile, heads: slice) -> None:
        """Change ``scores`` in place by the distances; a backward keeps the rectified scores for the factor."""
        rows, overlaps = scores.shape[-2], self.overlaps(tile)
        if "factor" in self.tables:
            scores.relu_()
            if self.learned:
                self.rectified = self._empty("rectified", scores.shape, scores.dtype).copy_(scores)
            for overlap in overlaps:
                scores[..., overlap.start : overlap.stop].mul_(self._toeplitz("factor", heads, overlap, rows))
        for overlap in overlaps:
            width = overlap.stop - overlap.start
            part = scores[..., overlap.start : overlap.stop]
            if "keys" in self.tables:
                # S_ij += q_i . keys[d_ij]: products with all distances of the tile, then the relative shift.
                part.add_(skew(self._spread(q, "keys", heads, overlap), width))
            if "bias" in self.tables:
                part.add_(self._toeplitz("bias", heads, overlap, rows))

    def add_gradients(self, errors: Tensor, q: Tensor, dq: Tensor, tile: Tile, heads: slice) -> None:
        """Collect the tables' gradients, add to ``dq``, and turn ``errors`` into the gradient of the plain scores."""
        rows, rectified = errors.shape[-2], self.rectified
        for overlap in self.overlaps(tile):
            part = errors[..., overlap.start : overlap.stop]
            if "bias" in self.tables and "bias" in self.learned:
                self._collect("bias", part, heads, overlap)
            if "keys" in self.tables:
                far = self._unskewed(part, q.dtype)
                # dQ_i += sum_j dS_ij keys[d_ij]
                dq.add_(_mix(far, self._slice("keys", heads, overlap, rows)))
                _outer(far, q, self._gradient("keys", heads, overlap, rows))
            if rectified is not None:
                if "factor" in self.learned:
                    product = self._empty("product", part.shape, part.dtype)
                    torch.mul(part, rectified[..., overlap.start : overlap.stop], out=product)
                    self._collect("factor", product, heads, overlap)
                part.mul_(self._toeplitz("factor", heads, overlap, rows))
        if rectified is not None:  # several times as fast as a mask
            torch.ops.aten.threshold_backward.grad_input(errors, rectified, 0, grad_input=errors)

    def _collect(self, name: str, errors: Tensor, heads: slice, overlap: Overlap) -> None:
        whole = errors.sum((0, 2), keepdim=True) if errors.shape[0] * errors.shape[2] > 1 else errors
        sums = self._unskewed(whole, whole.dtype).sum(-2)[0, :, 0]
        target = self._gradient(name, heads, overlap, errors.shape[-2])
        target += sums.sum_to_size(target.shape)

    def add_values(self, out: Tensor, weights: Tensor, tile: Tile, heads: slice) -> None:
        """Add weights * values to ``out`` [rows, heads, classes, group, queries, head_dim] in place."""
        if "values" in self.tables:
            for overlap in self.overlaps(tile):
                table = self._slice("values", heads, overlap, weights.shape[-2])
                out.add_(_mix(self._unskewed(weights[..., overlap.start : overlap.stop], table.dtype), table))

    def add_value_gradients(self, errors: Tensor, weights: Tensor, grad: Tensor, tile: Tile, heads: slice) -> None:
        """Collect the gradient of ``values`` and add the gradient of the weights to ``errors``, from the output's."""
        if "values" in self.tables:
            rows = weights.shape[-2]
            for overlap in self.overlaps(tile):
                width = overlap.stop - overlap.start
                part = errors[..., overlap.start : overlap.stop]
                part.add_(skew(self._spread(grad, "values", heads, overlap), width))
                far = self._unskewed(weights[..., overlap.start : overlap.stop], grad.dtype)
                _outer(far, grad, self._gradient("values", heads, overlap, rows))

    def _empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that every tile uses again, which the system would otherwise clear each time."""
        count = math.prod(shape)
        if name not in self.scratch or self.scratch[name].numel() < count:
            self.scratch[name] = next(iter(self.tables.values())).new_empty(count + count // 2, dtype=dtype)
        return self.scratch[name][:count].view(shape)

    def _spread(self, x: Tensor, name: str, heads: slice, overlap: Overlap) -> Tensor:
        """Return x [r, h, c, g, rows, d] times a table [h or 1, g or 1, n, d], as [r, h, c, g, rows, n]."""
        table = self.across[name][self._heads(name, heads), ..., self._distances(overlap, x.shape[-2])]
        flat = _by_table(x, table)
        out = self._empty("products", (*flat.shape[:2], table.shape[-1]), x.dtype)
        torch.bmm(flat, table.flatten(0, 1), out=out)
        return _by_tile(out, x.shape, table)

    def _unskewed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x [..., rows, width] as [..., rows, aligned(rows + width - 1)], (i, i + j) = x[i, j], else 0."""
        *shape, rows, width = x.shape
        span = aligned(rows + width - 1)
        out = self._empty("unskewed", (*shape, rows, span), dtype)
        flat = out.view(-1, rows * span)
        # What is 0 at the end of a row and at the beginning of the next is one run of numbers.
        strides, zeros = (rows * span, span + 1, 1), span + 1 - width
        flat.as_strided((len(flat), rows - 1, zeros), strides, out.storage_offset() + width).zero_()
        flat[:, (rows - 1) * (span + 1) + width :].zero_()
        skew(out, width).copy_(x)
        return out


def _by_table(x: Tensor, table: Tensor) -> Tensor:
    """Return x [r, h, c, g, rows, d] as [tables, rows of all heads that share one, d]."""
    if table.shape[:2] == (1, 1):
        return x.reshape(1, -1, x.shape[-1])
    return x.permute(1, 3, 0, 2, 4, 5).reshape(x.shape[1] * x.shape[3], -1, x.shape[-1])


def _by_tile(x: Tensor, shape: Sequence[int], table: Tensor) -> Tensor:
    """Invert :func:`_by_table` for a tensor of the ``shape``, except for its width; the result is a view."""
    r, h, c, g, rows, _ = shape
    if table.shape[:2] == (1, 1):
        return x.view(r, h, c, g, rows, -1)
    return x.view(h, g, r, c, rows, -1).permute(2, 0, 3, 1, 4, 5)


def _mix(far: Tensor, table: Tensor) -> Tensor:
    """Return far [r, h, c, g, rows, n] times table [h or 1, g or 1, n, d], as [r, h, c, g, rows, d]."""
    return _by_tile(torch.bmm(_by_table(far, table), table.flatten(0, 1)), far.shape, table)


def _outer(far: Tensor, x: Tensor, gradient: Tensor) -> None:
    """Add far^T x, summed over all heads that share the table, to ``gradient`` [h or 1, g or 1, n, d]."""
    accumulate(gradient.flatten(0, 1), _by_table(far, gradient).mT, _by_table(x, gradient))


# Between distances and pairs: a tile's element (i, j) stands at distance d0 + i + j when its keys are newest first.
# Views and one strided write do it, in time linear in the tile: the "relative shift" of Transformer-XL (Dai et al.
# 2019, appendix B) and its transpose, whose column sums equal the column sums of a Toeplitz matrix.


def aligned(count: int) -> int:
    """Return ``count`` rounded up: products with rows of any other length are slower."""
    return -(-count // _ALIGNED) * _ALIGNED


def skew(x: Tensor, width: int) -> Tensor:
    """Return a view [..., rows, width] of [..., rows, rows + width - 1 or more], dense, with (i, j) = x[i, i + j]."""
    *shape, rows, span = x.shape
    return x.as_strided((*shape, rows, width), (*x.stride()[:-2], span + 1, 1), x.storage_offset())


# Distances beyond which keys are lost to rounding, where a bias falls with the distance, as in ALiBi.
#
# A query that sees itself has a weight of at least exp(b_0 - |q| |k|) before the normaliser, with the longest q and k.
# All keys at the distance d or farther together weigh at most ``keys`` times exp(max b_d' + |q| |k|), d' >= d. From
# where
#
#     max b_d' - b_0 + 2 |q| |k| + log keys < log(eps / 8)
#
# they are lost when the normaliser is rounded, so the kernel skips them. It also skips subnormal exponentials, which
# take some processors a hundred cycles each.
#
# ``benchmarks/accelerators.py`` keeps it: by the rows ``falloff`` of ``accelerators.json``, ALiBi is 1.1 times as fast
# at 1,024 tokens, 2.0 at 4,096 and 3.7 at 16,384. Delete this path when the row of 4,096 tokens is below 1.1.

WORTH = 512
"""The number of keys from which searching for keys to skip is faster than computing them."""

_ROUNDING = 1.01  # of the products, whose operands may be narrow


def reaches(q: Tensor, k: Tensor, bias: Tensor, heads: int) -> list[int]:
    """Return for each of ``heads`` the distance from which on keys are negligible, or as many as ``bias`` has.

    ``q`` [rows * heads, group, queries, head_dim] with the scale in it, ``k`` [rows * heads, keys, head_dim], ``bias``
    [heads or 1, group or 1, n] of the distances 0, 1, ...
    """
    longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1, dtype=bias.dtype).flatten(1).amax(1) for x in (q, k))
    products = (longest_q * longest_k).view(-1, heads).amax(0)
    ahead = bias.flip(-1).cummax(-1).values.flip(-1) - bias[..., :1]
    # The inequality above, solved for max b_d' - b_0.
    threshold = math.log(torch.finfo(bias.dtype).eps / 8) - math.log(k.shape[1]) - 2 * _ROUNDING * products
    counts = ~(ahead.amax(1) < threshold[:, None])  # where anything is NaN, all count
    return counts.sum(-1).tolist()
