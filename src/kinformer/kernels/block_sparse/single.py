"""Attention of one query per head, as generation asks for: no plan, no tiles, only the slots that someone sees."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.kernels.block_sparse.problem import EPS, Problem, complex_queries


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Output [batch, q_heads, 1, head_dim_v] without dropout, by operations that autograd knows."""
    batch, heads, _, head_dim = q.shape
    slots, numbers = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    distances = torch.arange(slots - 1, -1, -1, device=q.device)
    seen = _visible(problem, distances)
    picked = seen.any(0).any(0).nonzero()[:, 0]
    if picked.shape[0] < slots:
        k, v, seen, distances = k[:, :, picked], v[:, :, picked], seen[:, :, picked], distances[picked]
    grouped = q.reshape(batch, k.shape[1], -1, head_dim)
    scores = _products(grouped, k, problem).flatten(1, 2).to(numbers)
    relative = problem.relative or Relative(0)
    if relative.factor is not None:
        scores = scores.relu() * _at(relative.factor, distances, relative.lowest)
    if relative.keys is not None:
        table = _at(relative.keys, distances, relative.lowest).to(q.dtype)
        scores = scores + problem.scale * (table @ q.mT)[..., 0]
    if relative.bias is not None:
        scores = scores + _at(relative.bias, distances, relative.lowest)
    weights = torch.softmax(scores.masked_fill(~seen, torch.finfo(numbers).min), -1) * seen
    weights = weights.to(v.dtype)
    out = torch.matmul(weights.view(*grouped.shape[:3], -1), v).view(batch, heads, 1, v.shape[-1])
    if relative.values is not None:
        out = out + weights[:, :, None] @ _at(relative.values, distances, relative.lowest).to(v.dtype)
    return out.to(q.dtype)


def _visible(problem: Problem, distances: Tensor) -> Tensor:
    """[batch, heads or 1, slots] bool."""
    pattern = problem.pattern
    k = problem.positions - distances
    rows = [pattern.at(head).allowed(problem.positions, k) & (k >= 0) for head in range(pattern.num_heads or 1)]
    seen = torch.stack(rows, 1)
    return seen if problem.hidden is None else seen & ~problem.hidden[:, None]


def _products(q: Tensor, k: Tensor, problem: Problem) -> Tensor:
    """q [batch, kv_heads, group, head_dim] and k [batch, kv_heads, slots, head_dim] as their form says."""
    if problem.form == "modulus":
        real, imaginary = (part @ k.mT for part in complex_queries(q))
        return problem.scale * (real.square() + imaginary.square() + EPS).sqrt()
    if problem.form == "additive":
        assert problem.vector is not None
        vector = problem.vector.view(*q.shape[1:3], 1, -1)
        return problem.scale * ((q[..., None, :] + k[:, :, None]).tanh() * vector).sum(-1)
    return (q * problem.scale) @ k.mT


def _at(table: Tensor, distances: Tensor, lowest: int) -> Tensor:
    """``table`` [heads, n, ...] at ``distances`` [slots]: [heads, slots, ...], 0 outside its range."""
    index = distances - lowest
    inside = (index >= 0) & (index < table.shape[1])
    found = table[:, index.clamp(0, table.shape[1] - 1)]
    return torch.where(inside.reshape(-1, *(1,) * (table.dim() - 2)), found, 0)
