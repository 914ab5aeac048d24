"""The forms of a score: how a tile's products of queries and keys become scores, with their gradients.

    S = form(Q, K) -> (dQ, dK) from dS;   S is ``scores``, dS ``errors``

q [n, rows, head_dim], k [n, keys, head_dim], scores [n, rows, keys]. A form stores what its ``backward`` needs from the
last ``forward``; ``backward`` may overwrite its ``errors``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kinformer.kernels.block_sparse.tile import accumulate
from kinformer.kernels.softmax.scores import EPS, complex_queries

_ELEMENTS = 1 << 21


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute left @ right into ``out``; inputs of lower precision are multiplied as
    they are, since a CPU cannot widen them."""
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
        """Return the gradient of q from that of the scores, and add that of k to ``dk``."""
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
