"""The forms of a score, from products of queries and keys, and the terms that distances add to it.

dot        scale * q . k
capped     scale * tanh(q . k)
modulus    scale * |q k| of complex numbers [re, im], none conjugated
additive   scale * vector . tanh(q + k)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinformer.core.contract import in_range
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.matmul import by_onednn, product_dtype

if TYPE_CHECKING:
    from kinformer.kernels.softmax.request import Scoring

EPS = 1e-12
"""Added under the root of a modulus, whose gradient at 0 would be infinite."""


MANY = 4
"""Up to this many distances a key a query meets every distance once; it meets few keys of many distances one by one."""


def relative_at(table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """Return the entries of ``table`` [heads, n, ...] (distances from ``lowest`` on) at ``distance``
    [...], as [heads, ..., ...], 0 outside."""
    if not table.shape[1]:
        return table.new_zeros(table.shape[0], *distance.shape, *table.shape[2:])
    index = distance - lowest
    inside = (index >= 0) & (index < table.shape[1])
    values = table[:, index.clamp(0, table.shape[1] - 1)]
    return torch.where(inside.reshape(inside.shape + (1,) * (table.dim() - 2)), values, 0)


def moved(scores: Tensor, q: Tensor, distance: Tensor, scoring: Scoring) -> Tensor:
    """Return ``scores`` [batch, heads, m, n] of q [batch, heads, m, head_dim] with
    the terms of ``distance`` [batch, m, n]."""
    relative = scoring.relative
    assert relative is not None
    if relative.factor is not None:
        scores = scores.relu() * relative_at(relative.factor, distance, relative.lowest).transpose(0, 1)
    if relative.keys is not None:
        shifted = q if relative.shift is None else q + relative.shift.to(q.dtype)
        scores = scores + scoring.scale * _met(shifted, relative.keys.to(q.dtype), distance, relative.lowest)
    if relative.bias is not None:
        scores = scores + relative_at(relative.bias, distance, relative.lowest).transpose(0, 1)
    return scores


def _met(q: Tensor, table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """Return q_i . table[d_ij] [batch, heads, m, n]: of all distances at once where these are not many more than keys,
    else one query or one key at a time, whichever are fewer."""
    if 0 < table.shape[1] <= MANY * distance.shape[2]:
        index, inside = _entries(table, distance, lowest)
        met = (q @ table.mT).gather(3, index.expand(-1, q.shape[1], -1, -1))
        return torch.where(inside, met, 0)
    if distance.shape[1] <= distance.shape[2]:
        rows = (relative_at(table, part, lowest).transpose(0, 1) for part in distance.unbind(1))
        return torch.stack([(row @ part[..., None])[..., 0] for row, part in zip(rows, q.unbind(2), strict=True)], 2)
    columns = (relative_at(table, part, lowest).transpose(0, 1) for part in distance.unbind(2))
    return torch.stack([(q * column).sum(-1) for column in columns], 3)


def _entries(table: Tensor, distance: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Return the entries of ``table`` [heads, n, ...] at ``distance`` [batch, m, n], and whether there is one, each
    [batch, 1, m, n]."""
    index = (distance - lowest)[:, None]
    last = table.shape[1] - 1
    return index.clamp(0, last), (index >= 0) & (index <= last)


def mixed(weights: Tensor, table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """Return sum_j weights_ij table[d_ij] [batch, heads, m, head_dim] of ``weights`` [batch, heads, m, n]."""
    if 0 < table.shape[1] <= MANY * distance.shape[2]:
        index, inside = _entries(table, distance, lowest)
        sums = weights.new_zeros(*weights.shape[:3], table.shape[1])
        return sums.scatter_add(3, index.expand_as(weights), torch.where(inside, weights, 0)) @ table
    if distance.shape[1] <= distance.shape[2]:
        rows = (relative_at(table, item, lowest).transpose(0, 1) for item in distance.unbind(1))
        return torch.stack(
            [(item[:, :, None] @ row)[:, :, 0] for row, item in zip(rows, weights.unbind(2), strict=True)], 2
        )
    out = weights.new_zeros(())
    for column, part in zip(distance.unbind(2), weights.unbind(3), strict=True):
        out = out + part[..., None] * relative_at(table, column, lowest).transpose(0, 1)
    return out


def complex_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return q = [re, im] as the vectors whose products with [re, im] keys are the real and imaginary part of q k."""
    real, imaginary = q.chunk(2, dim=-1)
    return torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)


def products(q: Tensor, k: Tensor, scoring: Scoring, vector: Tensor | None) -> Tensor:
    """Return scores [..., m, n] of q [..., m, head_dim] and k [..., n, head_dim] in the form of ``scoring``, in the
    dtype of their products.

    ``vector`` is that of the form "additive", and broadcasts to [..., m, n, head_dim].
    """
    if (dtype := product_dtype(q)) != q.dtype:
        with no_autocast(q.device):
            return products(q.to(dtype), k.to(dtype), scoring, vector)
    if scoring.form == "modulus":
        real, imaginary = (in_range(part @ k.mT) for part in complex_queries(q))
        return scoring.scale * (real.square() + imaginary.square() + EPS).sqrt()
    if scoring.form == "additive":
        assert vector is not None
        return scoring.scale * ((q[..., None, :] + k[..., None, :, :]).tanh() * vector).sum(-1)
    if scoring.form == "capped":
        return scoring.scale * (q @ k.mT).tanh()
    q = q * scoring.scale
    if q.dtype == torch.bfloat16 and by_onednn(q) and q.shape[-2] < k.shape[-2]:
        return (k @ q.mT).mT  # it reads many keys up to three times as fast as the left side
    return q @ k.mT
