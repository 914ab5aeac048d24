"""Softmax attention of each query over the memories that a search chose for it; memories take no gradient.

    y = sum_j softmax_j(q . k_j) v_j        j over the ``topk`` slots that the search chose for the query

The chosen rows are never held together: weighted sums of rows are ``embedding_bag``, products with rows those of a
sparse matrix, in the backward too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import embedding_bag

from kinformer.core.contract import state_dtype
from kinformer.kernels.softmax.request import Attended, Gathered
from kinformer.runtime.derivatives import Context


def attend(q: Tensor, k: Gathered, v: Gathered, scale: float, lse: bool) -> Attended:
    """Return the output [batch, heads, time, head_dim], 0 for a query without memories."""
    chosen = [index for index, (_, size) in enumerate(k.extents) if size]
    if not chosen:
        return Attended(torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=state_dtype(q.dtype)))
    slots = _slots(k, chosen)
    keys, values = ([_rows(tensor.tables[index], q.dtype) for index in chosen] for tensor in (k, v))
    none = (k.slots < 0).flatten(0, 2)
    queries = (q if scale == 1 else q * scale).flatten(0, 2)
    scores = _Scores.apply(queries, slots, keys).to(state_dtype(q.dtype)).masked_fill(none, -torch.inf)
    # A row of -inf alone would be NaN after softmax: such rows get 0 before and are selected away after.
    weights = torch.where(none, scores.new_zeros(()), scores.masked_fill(none.all(-1, keepdim=True), 0.0).softmax(-1))
    out = _Mixed.apply(weights.to(q.dtype), slots, values).view(q.shape)
    return Attended(out, scores.logsumexp(-1).view(q.shape[:3]) if lse else None)


def _rows(table: Tensor, dtype: torch.dtype) -> Tensor:
    return table.detach().reshape(-1, table.shape[-1]).to(dtype)


def _slots(k: Gathered, chosen: Sequence[int]) -> Tensor:
    """Return rows of each ``chosen`` table, [tables, batch * heads * time, topk],
    -1 where a slot is not in that table."""
    result, (batch, heads) = k.slots, k.slots.shape[:2]
    row = torch.arange(batch * heads, device=result.device).view(batch, heads, 1, 1)
    slots, begin = [], 0
    for index in chosen:
        first, size = k.extents[index]
        inside = (result >= begin) & (result < begin + size)
        slots.append(torch.where(inside, row * k.tables[index].shape[2] + first - begin + result, -1).flatten(0, 2))
        begin += size
    return torch.stack(slots)


def _sum(slots: Tensor, weights: Tensor, tables: list[Tensor]) -> Tensor:
    """Return the sums of the rows at ``slots`` by ``weights`` [queries, topk], over all tables."""
    nothing = weights.new_zeros(())
    parts = [
        embedding_bag(of.clamp_min(0), table, mode="sum", per_sample_weights=torch.where(of < 0, nothing, weights))
        for of, table in zip(slots, tables, strict=True)
    ]
    return sum(parts[1:], parts[0])


def _dot(q: Tensor, slots: Tensor, tables: list[Tensor]) -> Tensor:
    """Return q [queries, head_dim] . rows [queries, topk], 0 where a row is in no table."""
    scores = q.new_zeros(slots.shape[1:])
    for of, table in zip(slots, tables, strict=True):
        scores = torch.where(of < 0, scores, _products(q, of.clamp_min(0), table))
    return scores


class _Scores(torch.autograd.Function):
    """The function :func:`_dot` with a gradient that is a sum of rows: each of the two is the other's transpose."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, slots: Tensor, tables: list[Tensor]) -> Tensor:
        ctx.save_for_backward(slots, *tables)
        return _dot(q, slots, tables)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        slots, *tables = ctx.saved_tensors
        return _Mixed.apply(gradients[0], slots, tables), None, None


class _Mixed(torch.autograd.Function):
    """The function :func:`_sum` with a gradient that is a product with rows."""

    @staticmethod
    def forward(ctx: Context, weights: Tensor, slots: Tensor, tables: list[Tensor]) -> Tensor:
        ctx.save_for_backward(slots, *tables)
        return _sum(slots, weights, tables)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        slots, *tables = ctx.saved_tensors
        return _Scores.apply(gradients[0], slots, tables), None, None


def _products(q: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """Return q [queries, head_dim] . table[slots] as [queries, topk] without building table[slots]."""
    queries, topk = slots.shape
    begins = torch.arange(0, queries * topk + 1, topk, device=q.device)
    if topk <= len(table) and _samples(q):  # a sparse matrix holds at most every pair once
        _hush()
        values = q.new_zeros(queries * topk)
        pairs = torch.sparse_csr_tensor(
            begins, slots.flatten(), values, (queries, len(table)), check_invariants=False, device=q.device
        )
        return torch.sparse.sampled_addmm(pairs, q, table.T, beta=0.0).values().view(queries, topk)
    if q.device.type == "cuda" and q.element_size() < 4:  # which the operation does not take there
        return _products(q.float(), slots, table.float()).to(q.dtype)
    query = torch.arange(queries, device=q.device).repeat_interleave(topk)
    operation = torch.ops.aten._embedding_bag_per_sample_weights_backward  # of embedding_bag's sum, which it is part of
    return operation(q, table, slots.flatten(), begins[:-1], query, 0).view(queries, topk)


def _samples(q: Tensor) -> bool:
    """Return whether ``sampled_addmm`` serves: it is twice as fast as the gradient of ``embedding_bag``."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and not isinstance(q, FakeTensor)


@cache
def _hush() -> None:
    """Create one sparse tensor with warnings off: PyTorch warns once a process that they are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("cpu"):
            torch.sparse_csr_tensor(
                torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0), (0, 1)
            )
