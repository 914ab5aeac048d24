"""Attention over the pairs of a pattern, written densely: the truth the other implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.kernels.block_sparse.problem import EPS, Problem, complex_queries
from kinformer.kernels.softmax.geometry import dropout_mask


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [batch, q_heads, time, head_dim_v] and log-sum-exp [batch, q_heads, time], all pairs at once."""
    batch, heads, time, _ = q.shape
    slots, numbers = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    query, keys, values = (x.to(numbers) for x in (q, *(_per_query_head(x, heads) for x in (k, v))))
    seen = visible(problem, heads, slots)
    distance = _distance(time, slots, q.device)
    scores = _scores(query, keys, problem, distance).masked_fill(~seen, -torch.inf)
    sighted = seen.any(-1)
    top = scores.detach().amax(-1, keepdim=True).where(sighted[..., None], 0)
    weights = (scores - top).exp()
    total = weights.sum(-1).where(sighted, 1)
    probabilities = weights / total[..., None]
    if problem.dropout is not None:
        keep = dropout_mask(problem.dropout, batch, heads, time, slots, q.device)
        probabilities = probabilities * keep / (1 - problem.dropout.p)
    out = probabilities @ values
    if problem.relative is not None and problem.relative.values is not None:
        moved = _at(problem.relative.values.to(numbers), distance, problem.relative.lowest)
        out = out + torch.einsum("bhij,hijd->bhid", probabilities, moved.expand(heads, -1, -1, -1))
    lse = (total.log() + top[..., 0]).where(sighted, -torch.inf)
    return out.to(q.dtype), lse


def visible(problem: Problem, heads: int, slots: int) -> Tensor:
    """[batch, heads, time, slots] bool: may the query see the slot?"""
    q = problem.positions[:, :, None]
    k = q - _distance(q.shape[1], slots, q.device)
    rows = [problem.pattern.at(head).allowed(q, k) & (k >= 0) for head in range(problem.pattern.num_heads or 1)]
    seen = torch.stack(rows, 1).expand(-1, heads, -1, -1)
    return seen if problem.hidden is None else seen & ~problem.hidden[:, None, None]


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _distance(time: int, slots: int, device: torch.device) -> Tensor:
    """[time, slots]: query slot - key slot, the last query at the last slot."""
    query = slots - time + torch.arange(time, device=device)
    return query[:, None] - torch.arange(slots, device=device)


def _at(table: Tensor, distance: Tensor, lowest: int) -> Tensor:
    """``table`` [heads, n, ...] at every distance [time, slots]: [heads, time, slots, ...], 0 outside its range."""
    index = distance - lowest
    inside = (index >= 0) & (index < table.shape[1])
    found = table[:, index.clamp(0, table.shape[1] - 1)]
    return torch.where(inside.reshape(inside.shape + (1,) * (table.dim() - 2)), found, 0)


def _scores(q: Tensor, k: Tensor, problem: Problem, distance: Tensor) -> Tensor:
    scale, relative = problem.scale, problem.relative or Relative(0)
    if problem.form == "modulus":
        real, imaginary = (part @ k.mT for part in complex_queries(q))
        scores = scale * (real.square() + imaginary.square() + EPS).sqrt()
    elif problem.form == "additive":
        assert problem.vector is not None
        vector = problem.vector.to(q.dtype)[:, None, None]
        scores = scale * ((q[..., :, None, :] + k[..., None, :, :]).tanh() * vector).sum(-1)
    else:
        scores = scale * (q @ k.mT)
    if relative.factor is not None:
        scores = scores.relu() * _at(relative.factor.to(q.dtype), distance, relative.lowest)
    if relative.keys is not None:
        moved = _at(relative.keys.to(q.dtype), distance, relative.lowest).expand(q.shape[1], -1, -1, -1)
        scores = scores + scale * torch.einsum("bhid,hijd->bhij", q, moved)
    if relative.bias is not None:
        scores = scores + _at(relative.bias.to(q.dtype), distance, relative.lowest)
    return scores
