"""Softmax attention of each query to the memories that it found, which take no gradient.

    y = sum_j softmax_j(q . k_j) v_j

Nothing is gathered but for a moment: weighted sums of rows are ``embedding_bag``, in the backward too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kinformer.core.contract import state_dtype
from kinformer.kernels.lookup.pieces import Piece


def attend(q: Tensor, found: Tensor, pieces: list[Piece]) -> Tensor:
    """q [batch, heads, time, head_dim] -> y of that shape, 0 where nothing was found.

    found: [batch, heads, time, topk] as ``look_up`` gives it.
    """
    pieces = [piece for piece in pieces if piece.size]
    if not pieces:
        return torch.zeros_like(q)
    slots = _slots(found, pieces)
    keys, values = ([_rows(tensor, q.dtype) for tensor in each] for each in zip(*(p[:2] for p in pieces), strict=True))
    none = (found < 0).flatten(0, 2)
    scores = _Scores.apply(q.flatten(0, 2), slots, keys).to(state_dtype(q.dtype)).masked_fill(none, -torch.inf)
    weights = torch.where(none, scores.new_zeros(()), scores.masked_fill(none.all(-1, keepdim=True), 0.0).softmax(-1))
    weights = weights.to(q.dtype)
    return _sum(slots, weights, values).view(q.shape)


def _rows(table: Tensor, dtype: torch.dtype) -> Tensor:
    return table.detach().reshape(-1, table.shape[-1]).to(dtype)


def _slots(found: Tensor, pieces: list[Piece]) -> Tensor:
    """Rows of each piece's table [pieces, batch * heads * time, topk]; -1 where it is not in that piece."""
    batch, heads = found.shape[:2]
    row = torch.arange(batch * heads, device=found.device).view(batch, heads, 1, 1)
    slots, begin = [], 0
    for piece in pieces:
        inside = (found >= begin) & (found < begin + piece.size)
        slots.append(torch.where(inside, row * piece.k.shape[2] + piece.first - begin + found, -1).flatten(0, 2))
        begin += piece.size
    return torch.stack(slots)


def _sum(slots: Tensor, weights: Tensor, tables: list[Tensor]) -> Tensor:
    """Sums of rows by ``weights`` [queries, topk], over all pieces."""
    nothing = weights.new_zeros(())
    parts = [
        embedding_bag(of.clamp_min(0), table, mode="sum", per_sample_weights=torch.where(of < 0, nothing, weights))
        for of, table in zip(slots, tables, strict=True)
    ]
    return sum(parts[1:], parts[0])


class _Scores(torch.autograd.Function):
    """q [queries, head_dim] . rows [queries, topk]; backward is a sum of rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, slots: Tensor, tables: list[Tensor]) -> Tensor:
        ctx.save_for_backward(slots, *tables)
        scores = q.new_zeros(slots.shape[1:])
        for of, table in zip(slots, tables, strict=True):
            scores = torch.where(of < 0, scores, _products(q, of.clamp_min(0), table))
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        slots, *tables = ctx.saved_tensors
        return _sum(slots, gradients[0], tables), None, None


def _products(q: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """q [queries, head_dim] . table[slots] [queries, topk, head_dim], without holding the latter."""
    queries, topk = slots.shape
    begins = torch.arange(0, queries * topk, topk, device=q.device)
    query = torch.arange(queries, device=q.device).repeat_interleave(topk)
    operation = torch.ops.aten._embedding_bag_per_sample_weights_backward  # of embedding_bag's sum, which it is part of
    return operation(q, table, slots.flatten(), begins, query, 0).view(queries, topk)
