"""Softmax attention of few queries, as generation needs it: one query, few queries, gathered memories, int8 caches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.nn.functional import embedding_bag

from kinformer.core.attention_state import SCALE, Quantized, scales
from kinformer.core.contract import state_dtype
from kinformer.core.parts import Relative
from kinformer.core.pattern import Band
from kinformer.kernels.band import interval
from kinformer.kernels.softmax import (
    Attended,
    Gathered,
    Projected,
    Scoring,
    Visibility,
    mixed,
    moved,
    products,
    query_positions,
    relative_at,
)
from kinformer.runtime.autograd import Context, no_autocast
from kinformer.runtime.process import multiplies_int8, product_dtype

# Attention of one query per head, for generation, without a plan and without tiles. If a pattern hides most slots,
# only the slots that some head sees are gathered.
#
# out = softmax_j(scale * q . k_j + what distance and decay add) v_j,   j over those slots and, of value 0, the sink


def attend_one_query(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring, lse: bool = False
) -> Attended:
    """Return the output [batch, q_heads, 1, head_dim_v] without dropout, and ``lse`` on request, by operations that
    autograd differentiates.

    A bias by distance of -inf may hide keys, but of a band that rows see whole not all: the output would be NaN. No
    span does, for which the nearest key always counts. A weight of 0 there, by PyTorch's safe softmax or a mask, would
    make a call with a bias take 1.07 to 1.2 times as long (4 heads, 64 to 4,096 keys, one thread of an Intel Xeon).
    """
    batch, heads, _, head_dim = q.shape
    accumulator, relative = state_dtype(q.dtype), scoring.relative
    decay = None if scoring.decay is None else scoring.decay[..., -1:] - scoring.decay  # c_i - c_j
    k, v, decay, seen, distance = _seen_slots(q, (k, v), decay, visibility, relative is not None)
    grouped = q.reshape(batch, k.shape[1], -1, head_dim)
    vector = None if scoring.vector is None else scoring.vector.view(*grouped.shape[1:3], 1, head_dim)
    scores = products(grouped, k, scoring, vector)
    if relative is not None:
        assert distance is not None
        scores = _moved(scores.flatten(1, 2).to(accumulator), q, distance, scoring.scale, relative).view(scores.shape)
    if decay is not None:
        scores = scores.to(accumulator) + decay.to(accumulator).view(scores.shape)
    if scoring.sink is not None:
        sink = scoring.sink.to(scores.dtype).view(1, *grouped.shape[1:3], 1).expand(batch, -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
        seen = None if seen is None else torch.nn.functional.pad(seen, (0, 1), value=True)
    if seen is None:
        weights = torch.softmax(scores, -1, dtype=accumulator)
    else:
        seen = seen.expand(-1, heads, -1).reshape(*grouped.shape[:3], -1) if seen.shape[1] > 1 else seen[:, :, None]
        # The lowest number instead of -inf keeps a blind row finite; the product with the mask then zeroes it.
        scores = scores.to(accumulator).masked_fill(~seen, torch.finfo(accumulator).min)
        weights = torch.softmax(scores, -1) * seen
    sums = _sums(scores.to(accumulator), seen).view(batch, heads, 1) if lse else None
    weights = weights[..., : k.shape[2]].to(v.dtype)
    out = torch.matmul(weights, v).reshape(batch, heads, 1, v.shape[-1])
    if relative is not None and relative.values is not None:
        assert distance is not None
        out = out + weights.flatten(1, 2)[:, :, None] @ relative_at(relative.values, distance, relative.lowest).to(v)
    return Attended(out.to(q.dtype), sums)


def _sums(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Return the log-sum-exps of the last axis, -inf where nothing is ``seen``."""
    sums = scores.logsumexp(-1)
    return sums if seen is None else sums.masked_fill(~seen.any(-1), -torch.inf)


def _seen_slots(
    q: Tensor, kv: tuple[Tensor, Tensor], decay: Tensor | None, visibility: Visibility, measured: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the keys, values and decays that some head may see, which head sees which, and their distances. The mask
    is [batch, heads or 1, slots], None where all heads see all; distances [slots] are None where they are neither
    needed for the mask nor ``measured``."""
    (k, v), pattern = kv, visibility.pattern
    slots = k.shape[2]
    assert pattern is not None
    if pattern.band is None or visibility.key_padding_mask is not None:
        distance = torch.arange(slots - 1, -1, -1, device=q.device)
        q_at = query_positions(visibility, q, slots)
        k_at, heads = q_at - distance, range(pattern.num_heads or 1)
        seen = torch.stack([pattern.at(head).allowed(q_at, k_at) & (k_at >= 0) for head in heads], 1)
        if visibility.key_padding_mask is not None:
            seen = seen & ~visibility.key_padding_mask[:, None]
        # Gathering slots pays only where the pattern hides more than half of them.
        if pattern.horizon is not None and 2 * pattern.horizon >= slots:  # the pattern hides few slots
            return k, v, decay, seen, distance
        picked = seen.any(0).any(0).nonzero()[:, 0]
        if picked.shape[0] < slots:
            k, v, seen, distance = k[:, :, picked], v[:, :, picked], seen[:, :, picked], distance[picked]
            decay = None if decay is None else decay[:, :, picked]
        return k, v, decay, seen, distance
    first, end = interval(visibility, 1, slots)
    if end - first < slots:
        k, v = k[:, :, first:end], v[:, :, first:end]
        decay = None if decay is None else decay[:, :, first:end]
    positions = None if visibility.whole else visibility.positions
    if positions is None and not measured:
        return k, v, decay, None, None
    distance = torch.arange(slots - 1 - first, slots - 1 - end, -1, device=q.device)
    return k, v, decay, None if positions is None else (distance <= positions)[:, None], distance


def _moved(scores: Tensor, q: Tensor, distance: Tensor, scale: float, relative: Relative) -> Tensor:
    """Return ``scores`` [batch, heads, slots] with the position's factor, keys and bias of their distances."""
    if relative.factor is not None:
        scores = scores.relu() * relative_at(relative.factor, distance, relative.lowest)
    if relative.keys is not None:
        q = q.to(product_dtype(q))
        table = relative_at(relative.keys, distance, relative.lowest).to(q.dtype)
        shifted = q if relative.shift is None else q + relative.shift.to(q.dtype)
        with no_autocast(q.device):
            scores = scores + scale * (table @ shifted.mT)[..., 0]
    if relative.bias is not None:
        scores = scores + relative_at(relative.bias, distance, relative.lowest)
    return scores


# Attention of few queries, or over few keys, all pairs at once: any mask, any bias, the scores of all pairs at once.
#
#     out = P V / l,   P = exp(S - max S),   l = rowsum(P);   in the code S is ``scores``, P ``weights``, l ``total``
#
# P is saved for the backward, so queries or keys must be few: memory is the product of their numbers.
#
# This is the only kernel for masks and biases of pairs and for the log-sum-exps of sets. Two shortcuts have an
# alternative, and ``benchmarks/accelerators.py`` keeps them. Keys that are never computed (rows ``projected`` of
# ``accelerators.json``) are 2.2 times as fast for 16 queries; delete ``attend_projected`` when the row is below 1.1.
# Small sets where oneDNN makes the products (rows ``sets``) are 1.8 to 10 times as fast as PyTorch's kernel; delete
# :data:`SETS` when all of these rows are below 1.1.

SETS = 1 << 14
"""Pairs in a head up to which sets are attended here, where P fits into the caches."""


def attend_few(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Attend without a pattern over all keys that the masks leave; terms by distance are added pair by pair."""
    if (dtype := product_dtype(q)) != q.dtype:
        with no_autocast(q.device):
            out, lse = attend_few(q.to(dtype), k.to(dtype), v.to(dtype), visibility, scoring)
        return Attended(out.to(v.dtype), lse)
    heads = q.shape[1] // k.shape[1]
    if heads > 1:
        k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
    vector = None if scoring.vector is None else scoring.vector[:, None, None]
    scores = products(q, k, scoring, vector)
    if scoring.relative is not None:
        scores = moved(scores.to(state_dtype(scores.dtype)), q, visibility.distance(), scoring)
    weights, total, lse = _weights(scores, visibility, scoring)
    weights = weights.to(v.dtype)
    out = weights @ v
    if scoring.relative is not None and scoring.relative.values is not None:
        table = scoring.relative.values.to(v.dtype)
        out = out + mixed(weights, table, visibility.distance(), scoring.relative.lowest)
    return Attended(out / total.to(v.dtype), lse)


def attend_projected(q: Tensor, k: Projected, v: Projected, visibility: Visibility, scoring: Scoring) -> Attended:
    """Attend without computing keys and values. The products take x itself:

    q (x W_k^T)^T = (q W_k) x^T,   P (x W_v^T + b) = (P x) W_v^T + b

    which costs 2 * heads * time * n * dim rather than 2 * n * dim * heads * head_dim operations each.
    """
    if (dtype := product_dtype(q)) != q.dtype:
        with no_autocast(q.device):
            out, lse = attend_projected(q.to(dtype), k.to(dtype), v.to(dtype), visibility, scoring)
        return Attended(out.to(q.dtype), lse)
    batch, heads, time, head_dim = q.shape
    q, x, weight = q * scoring.scale, k.x, v.weight
    # q W_k, then (q W_k) x^T + q . b_k: the scores without K = x W_k^T + b_k.
    inner = torch.einsum("bhmd,hdw->bhmw", q, k.weight.view(heads, head_dim, -1))
    scores = (inner.flatten(1, 2) @ x.mT).view(batch, heads, time, -1)
    if k.bias is not None:
        scores = scores + q @ k.bias.to(q.dtype).view(heads, head_dim, 1)
    weights, total, lse = _weights(scores, visibility, scoring)
    # (P x) / l first, then W_v: the output without V = x W_v^T + b_v.
    mixed = (weights.to(x.dtype).flatten(1, 2) @ x).view(batch, heads, time, -1) / total.to(x.dtype)
    out = torch.einsum("bhmw,hdw->bhmd", mixed, weight.view(heads, head_dim, -1))
    if v.bias is not None:
        # The bias b_v counts with the sum of the weights: 1, or less where dropout removed some, or 0 for a blind row.
        share = weights.sum(-1, keepdim=True) / total
        out = out + share.to(out.dtype) * v.bias.to(out.dtype).view(heads, 1, head_dim)
    return Attended(out, lse)


def _weights(scores: Tensor, visibility: Visibility, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - row maximum), its sum [..., 1] before dropout (1 for a row without keys) and the log-sum-exp,
    in float32 or better. The product is divided by the sum, so that the backward keeps the weights alone."""
    scores = scores.to(state_dtype(scores.dtype))
    if scoring.bias is not None:
        scores = scores + scoring.bias
    if visibility.key_padding_mask is not None:
        scores = scores.masked_fill(visibility.key_padding_mask[:, None, None], -torch.inf)
    if visibility.attn_mask is not None:
        scores = scores.masked_fill(~visibility.attn_mask, -torch.inf)
    # The maximum cancels in P / l, so it takes no gradient; -inf - (-inf) would be NaN, so a blind row subtracts 0.
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1)
    lse = (total.log() + top).masked_fill(blind, -torch.inf).squeeze(-1)
    if scoring.dropout is not None:
        retained = scoring.dropout.retained_mask(weights.shape, weights.device)
        weights = weights * retained / (1 - scoring.dropout.p)
    return weights, total, lse


# Attention of one query over past keys and values in 8 bits, without converting them to floats.
#
# Keys are k_j ~ a_j K_j and values v_j ~ b_j V_j, K and V of int8 with a scale each (``core.attention_state``). A query
# is two int8 vectors, q ~ s (Q + R / 254), off by s / 508 at most, and so are the weights that meet the values:
#
#     S_j = s (Q + R / 254) . K_j a_j,    w_j = exp(S_j - top) b_j ~ t (W_j + X_j / 254),
#     out = (t sum_j (W_j + X_j / 254) V_j + exp(S_new - top) v_new) / sum exp
#
# The new token's key and value stay in floating point. Four products of int8 numbers read a quarter of float32's
# bytes, and only the results are converted.
#
# ``benchmarks/int8_cache.py`` keeps it (``int8_cache.json``): a step is several times as fast as after converting the
# past. Delete this path when a step after 4,096 tokens is less than 1.5 times as fast.

LEAST = 1024
"""Slots from which on products of int8 win (4 heads of 64, one thread of an Intel Xeon with AVX-512 and VNNI)."""
MOST = 1 << 17
"""Products of 127 x 127 that int32 can sum."""
_INT8, _SECOND = 127, 254


def fits(q: Tensor, k: Quantized, visibility: Visibility, scoring: Scoring, lse: bool) -> bool:
    """Return whether the call is one query over a band, its scores are dot products, and int8 is faster here."""
    more = (scoring.vector, scoring.relative, scoring.bias, scoring.dropout, scoring.decay, visibility.key_padding_mask)
    if lse or scoring.form != "dot" or not isinstance(visibility.pattern, Band) or any(x is not None for x in more):
        return False
    learns = torch.is_grad_enabled() and q.requires_grad
    if learns or q.shape[2] != 1 or q.dtype == torch.float64 or torch.compiler.is_compiling() or is_fake(q):
        return False
    return LEAST <= k.slots.shape[2] < MOST and multiplies_int8(q.device.type)


def attend_int8(q: Tensor, k: Quantized, v: Quantized, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, 1, head_dim] of q, over the past and the token itself, as ``attention``."""
    batch, heads, _, width = q.shape
    rows, slots = batch * k.slots.shape[1], k.slots.shape[2] + 1
    first, _ = interval(visibility, 1, slots)
    keys, values = (x.slots[:, :, first:].flatten(0, 1) for x in (k, v))
    q = q.reshape(rows, -1, width).float() * scoring.scale
    scores = _products(q, keys[..., :-SCALE].mT).mul_(scales(keys)[..., 0].unsqueeze(1))
    itself = (q * k.new.reshape(rows, 1, width)).sum(-1, keepdim=True)
    if not visibility.whole and visibility.positions is not None:
        distance = torch.arange(slots - 1 - first, 0, -1, device=q.device)
        hidden = (distance > visibility.positions).repeat_interleave(k.slots.shape[1], 0).unsqueeze(1)
        scores.masked_fill_(hidden, -torch.inf)
    top = torch.maximum(scores.amax(-1, keepdim=True), itself)
    weights, alone = scores.sub_(top).exp_(), (itself - top).exp_()
    total = weights.sum(-1, keepdim=True).add_(alone)
    if scoring.sink is not None:
        total.add_((scoring.sink.float().view(1, -1, 1).expand(batch, -1, -1).reshape(itself.shape) - top).exp_())
    weights.mul_(scales(values)[..., 0].unsqueeze(1))
    out = _products(weights, values[..., :-SCALE]).addcmul_(alone, v.new.reshape(rows, 1, -1).float()).div_(total)
    return Attended(out.view(batch, heads, 1, -1).to(v.new.dtype))


def _products(x: Tensor, numbers: Tensor) -> Tensor:
    """Return x [rows, group, n] times ``numbers`` [rows, n, m] of int8, in float32."""
    scale = (x.abs().amax(-1, keepdim=True) / _INT8).clamp_min_(torch.finfo(x.dtype).tiny)
    x = x / scale
    first = x.round()
    second = x.sub_(first).mul_(_SECOND).round_()
    halves = torch.cat([first, second], 1).to(torch.int8)
    made = torch.stack([torch._int_mm(half, matrix) for half, matrix in zip(halves, numbers, strict=True)])
    first, second = made.float().chunk(2, 1)
    return torch.add(first, second, alpha=1 / _SECOND).mul_(scale)


# Softmax attention of each query over the memories that a search chose for it; memories take no gradient.
#
#     y = sum_j softmax_j(q . k_j) v_j        j over the ``topk`` slots that the search chose for the query
#
# The chosen rows are never gathered into one tensor: weighted sums of rows use ``embedding_bag``, products with rows
# use a sparse matrix, in the backward too.


def attend_gathered(q: Tensor, k: Gathered, v: Gathered, scale: float, lse: bool) -> Attended:
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
    """Return rows of each ``chosen`` table, [tables, batch * heads * time, topk], -1 where a slot is in another."""
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
        scores = torch.where(of < 0, scores, _gathered_products(q, of.clamp_min(0), table))
    return scores


class _Scores(torch.autograd.Function):
    """The function :func:`_dot`, whose gradient is a sum of rows: each of the two is the transpose of the other."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, slots: Tensor, tables: list[Tensor]) -> Tensor:
        ctx.save_for_backward(slots, *tables)
        return _dot(q, slots, tables)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        slots, *tables = ctx.saved_tensors
        return _Mixed.apply(gradients[0], slots, tables), None, None


class _Mixed(torch.autograd.Function):
    """The function :func:`_sum`, whose gradient is a product with rows."""

    @staticmethod
    def forward(ctx: Context, weights: Tensor, slots: Tensor, tables: list[Tensor]) -> Tensor:
        ctx.save_for_backward(slots, *tables)
        return _sum(slots, weights, tables)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        slots, *tables = ctx.saved_tensors
        return _Scores.apply(gradients[0], slots, tables), None, None


def _gathered_products(q: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """Return q [queries, head_dim] . table[slots] as [queries, topk] without building table[slots]."""
    queries, topk = slots.shape
    begins = torch.arange(0, queries * topk + 1, topk, device=q.device)
    # ``sampled_addmm`` is twice as fast as the gradient of ``embedding_bag``; its matrix holds every pair at most once.
    sampled = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and not isinstance(q, FakeTensor)
    if topk <= len(table) and sampled:
        _hush()
        values = q.new_zeros(queries * topk)
        pairs = torch.sparse_csr_tensor(
            begins, slots.flatten(), values, (queries, len(table)), check_invariants=False, device=q.device
        )
        return torch.sparse.sampled_addmm(pairs, q, table.T, beta=0.0).values().view(queries, topk)
    if q.device.type == "cuda" and q.element_size() < 4:  # which the operation does not take there
        return _gathered_products(q.float(), slots, table.float()).to(q.dtype)
    query = torch.arange(queries, device=q.device).repeat_interleave(topk)
    operation = torch.ops.aten._embedding_bag_per_sample_weights_backward  # of embedding_bag's sum, which it is part of
    return operation(q, table, slots.flatten(), begins[:-1], query, 0).view(queries, topk)


@cache
def _hush() -> None:
    """Create one sparse tensor with warnings off: PyTorch warns once a process that they are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("cpu"):
            torch.sparse_csr_tensor(
                torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0), (0, 1)
            )
