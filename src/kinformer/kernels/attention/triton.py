"""Softmax attention over a band in Triton, for a GPU; Triton's interpreter runs it on a CPU, for tests.

    score_ij = form(q_i . k_j) + scale * q_i . keys[d] + bias[d] + c_i - c_j,   d = past + i - j
    out_i = sum_j p_ij (v_j + values[d]),   p_i = softmax_j(score_ij),   lse_i = logsumexp_j(score_ij)

One program computes ``SIZE`` queries, and goes over blocks of ``SIZE`` keys. The distances of a block's pairs are
2 SIZE - 1 consecutive ones, so the rows of a table that a block needs are consecutive too: a product q . keys[d] is a
product [SIZE, 2 SIZE] whose row i is read from column i + SIZE - 1 - j on (:func:`aligned`), and the gradient of a
table is the sum over the same places (:func:`skewed`), added to the table by atomic sums.

Scores, sums and gradients of tables are float32; operands are float16, bfloat16 or float32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kinformer.kernels.band import limits
from kinformer.kernels.linear.triton import INTERPRETED, LEAST, product, side
from kinformer.kernels.softmax import EPS, Attended, Scoring, Visibility, complex_queries, dropout_words
from kinformer.runtime.autograd import Context, check_reverse, first_order
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.errors import KinformerError

_EPS = tl.constexpr(EPS)


@triton.jit
def tile(length, SIZE: tl.constexpr):
    """Return the row and head of a program, in one number, and its first token. Other axes of a grid end at 65,535."""
    tiles = (length + SIZE - 1) // SIZE
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * SIZE


@triton.jit
def loaded(x, rows, inside, width, WIDTH: tl.constexpr):
    """Return the ``rows`` [n] of x [..., width] as [n, WIDTH], 0 where not ``inside`` and beyond the width."""
    f = tl.arange(0, WIDTH)
    return tl.load(x + rows[:, None] * width + f[None, :], inside[:, None] & (f < width)[None, :], 0.0)


@triton.jit
def near(table, first, count, width, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the rows [2 SIZE, WIDTH] of a table [count, width] from row ``first`` on, 0 outside of it."""
    at = first + tl.arange(0, 2 * SIZE)
    return loaded(table, at, (at >= 0) & (at < count), width, WIDTH)


@triton.jit
def aligned(x, SIZE: tl.constexpr):
    """Return x [SIZE, 2 SIZE] by query and distance as [SIZE, SIZE] by query and key."""
    t = tl.arange(0, SIZE)
    return tl.gather(x, t[:, None] + (SIZE - 1) - t[None, :], 1)


@triton.jit
def skewed(x, SIZE: tl.constexpr):
    """Return x [SIZE, SIZE] by query and key as [SIZE, 2 SIZE] by query and distance, 0 for keys outside."""
    key = tl.arange(0, SIZE)[:, None] + (SIZE - 1) - tl.arange(0, 2 * SIZE)[None, :]
    inside = (key >= 0) & (key < SIZE)
    return tl.where(inside, tl.gather(x, tl.where(inside, key, 0), 1), 0.0)


@triton.jit
def entries(table, d, lowest, count):
    """Return the entries of a table [count] at distances d, 0 outside."""
    at = d - lowest
    return tl.load(table + at, (at >= 0) & (at < count), 0.0)


@triton.jit
def raw(Q, Q2, K, scale, FORM: tl.constexpr, SIZE: tl.constexpr):
    """Return the scores of a tile before distances change them, and their slopes in q . k and q2 . k."""
    x = product(Q, tl.trans(K), tl.zeros([SIZE, SIZE], tl.float32))
    slope, slope2 = scale, 0.0
    if FORM == "capped":
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0  # tanh
        slope = scale * (1.0 - x * x)
    if FORM == "modulus":
        y = product(Q2, tl.trans(K), tl.zeros([SIZE, SIZE], tl.float32))
        root = tl.sqrt(x * x + y * y + _EPS)
        slope, slope2, x = scale * x / root, scale * y / root, root
    return scale * x, slope, slope2


@triton.jit
def changed(
    x, Q, d, head, c_i, c_j, bias, factor, keys, bias_step, factor_step, keys_step,
    scale, lowest, count, first, width, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the scores x of a tile with the terms of distances and of the decay; ``first``: the row of the tile's
    least distance in the tables."""
    if factor is not None:
        x = tl.maximum(x, 0.0) * entries(factor + head * factor_step, d, lowest, count)
    if bias is not None:
        x += entries(bias + head * bias_step, d, lowest, count)
    if keys is not None:  # noqa: SIM102  None or not is known when the kernel is compiled
        if (first < count) & (first + 2 * SIZE > 0):
            R = near(keys + head * keys_step, first, count, width, SIZE, WIDTH)
            x += scale * aligned(product(Q, tl.trans(R), tl.zeros([SIZE, 2 * SIZE], tl.float32)), SIZE)
    if c_i is not None:
        x += c_i[:, None] - c_j[None, :]
    return x


@triton.jit
def visible(d, i, j, time, slots, behind, ahead, lookback, padding, row):
    """Return which queries i see which keys j, [SIZE, SIZE]; ``row`` of the batch."""
    seen = (d <= behind) & (d >= -ahead) & (i < time)[:, None] & (j < slots)[None, :]
    if lookback is not None:
        seen &= d <= tl.load(lookback + row * time + i, i < time, 0).to(tl.int32)[:, None]
    if padding is not None:
        seen &= (tl.load(padding + row * slots + j, j < slots, 1) == 0)[None, :]
    return seen


@triton.jit
def retained(rows, columns, threshold):
    """Return which probabilities a dropout retains (:func:`kinformer.kernels.softmax.keep`)."""
    x = (rows[:, None] + columns[None, :]).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def forward(
    q, q2, k, v, out, lse, lookback, padding, bias, factor, keys, values, decay, rows, columns, threshold, grown,
    bias_step, factor_step, keys_step, values_step, scale, lowest, count, heads, group, time, slots, width, wide,
    behind, ahead, FORM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and log-sum-exps of ``SIZE`` queries of one head."""
    here, start = tile(time, SIZE)
    row, head, past = here // heads, here % heads, slots - time
    i = start + tl.arange(0, SIZE)
    Q = loaded(q, here * time + i, i < time, width, WIDTH)
    Q2 = Q
    if FORM == "modulus":
        Q2 = loaded(q2, here * time + i, i < time, width, WIDTH)
    c_i = None
    if decay is not None:  # relative to the first query's, as the sums of long texts have no digits left
        middle = tl.load(decay + here * slots + past + start)
        c_i = (tl.load(decay + here * slots + past + i, i < time, 0.0) - middle).to(tl.float32)
    if rows is not None:
        drawn = tl.load(rows + here * time + i, i < time, 0)
    top = tl.full([SIZE], -float("inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    result = tl.zeros([SIZE, WIDE], tl.float32)
    begin = tl.maximum(past + start - behind, 0) // SIZE * SIZE
    end = tl.minimum(slots, past + start + SIZE + ahead)
    for at in range(begin, end, SIZE):
        j = at + tl.arange(0, SIZE)
        held = (row * (heads // group) + head // group) * slots + j
        d = past + i[:, None] - j[None, :]
        first = past + start - at - (SIZE - 1) - lowest
        K = loaded(k, held, j < slots, width, WIDTH)
        x, _, _ = raw(Q, Q2, K, scale, FORM, SIZE)
        c_j = None
        if decay is not None:
            c_j = (tl.load(decay + here * slots + j, j < slots, 0.0) - middle).to(tl.float32)
        x = changed(
            x, Q, d, head, c_i, c_j, bias, factor, keys, bias_step, factor_step, keys_step, scale, lowest, count, first,
            width, SIZE, WIDTH,
        )  # fmt: skip
        x = tl.where(visible(d, i, j, time, slots, behind, ahead, lookback, padding, row), x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # a query without a visible key so far has top = -inf
        p = tl.exp(x - safe[:, None])
        shrunk = tl.exp(top - safe)
        total, top = total * shrunk + tl.sum(p, 1), higher
        if rows is not None:
            p = tl.where(retained(drawn, tl.load(columns + j, j < slots, 0), threshold), p * grown, 0.0)
        V = loaded(v, held, j < slots, wide, WIDE)
        result = product(p.to(V.dtype), V, result * shrunk[:, None])
        if values is not None:  # noqa: SIM102  None or not is known when the kernel is compiled
            if (first < count) & (first + 2 * SIZE > 0):
                R = near(values + head * values_step, first, count, wide, SIZE, WIDE)
                result = product(skewed(p, SIZE).to(R.dtype), R, result)
    e = tl.arange(0, WIDE)
    some = tl.where(total == 0.0, 1.0, total)
    result = result / some[:, None]
    tl.store(out + (here * time + i)[:, None] * wide + e[None, :], result, (i < time)[:, None] & (e < wide)[None, :])
    tl.store(lse + here * time + i, tl.where(total == 0.0, -float("inf"), top + tl.log(some)), i < time)


@triton.jit
def slopes_of(
    Q, Q2, Y, K, V, i, j, d, first, here, row, head, c_i, c_j, drawn, top, delta, lookback, padding, bias, factor, keys,
    values, columns, threshold, grown, bias_step, factor_step, keys_step, values_step, scale, lowest, count, time,
    slots, width, wide, behind, ahead,
    FORM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return for one tile the probabilities after dropout, the slopes of the scores, of the scores before distances
    change them, of q . k and of q2 . k, and the scores that the factor multiplies."""
    x, slope, slope2 = raw(Q, Q2, K, scale, FORM, SIZE)
    positive = tl.maximum(x, 0.0)
    s = changed(
        x, Q, d, head, c_i, c_j, bias, factor, keys, bias_step, factor_step, keys_step, scale, lowest, count, first,
        width, SIZE, WIDTH,
    )  # fmt: skip
    seen = visible(d, i, j, time, slots, behind, ahead, lookback, padding, row)
    p = tl.where(seen, tl.exp(s - top[:, None]), 0.0)
    dp = product(Y, tl.trans(V), tl.zeros([SIZE, SIZE], tl.float32))
    if values is not None:  # noqa: SIM102  None or not is known when the kernel is compiled
        if (first < count) & (first + 2 * SIZE > 0):
            R = near(values + head * values_step, first, count, wide, SIZE, WIDE)
            dp += aligned(product(Y, tl.trans(R), tl.zeros([SIZE, 2 * SIZE], tl.float32)), SIZE)
    dropped = p
    if drawn is not None:
        alive = retained(drawn, tl.load(columns + j, j < slots, 0), threshold)
        dp, dropped = tl.where(alive, dp * grown, 0.0), tl.where(alive, p * grown, 0.0)
    ds = p * (dp - delta[:, None])
    dx = ds
    if factor is not None:
        dx = tl.where(x > 0, ds * entries(factor + head * factor_step, d, lowest, count), 0.0)
    return dropped, ds, dx * slope, dx * slope2, positive


@triton.jit
def backward_queries(
    q, q2, k, v, grad, dq, dq2, lse, delta, lookback, padding, bias, factor, keys, values, decay, rows, columns,
    threshold, grown, dbias, dfactor, dkeys, dvalues, ddecay, bias_step, factor_step, keys_step, values_step, scale,
    lowest, count, heads, group, time, slots, width, wide, behind, ahead,
    FORM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``SIZE`` queries of one head, and their parts of the gradients of tables and decay."""
    here, start = tile(time, SIZE)
    row, head, past = here // heads, here % heads, slots - time
    i = start + tl.arange(0, SIZE)
    tokens, inside = here * time + i, i < time
    Q, Y = loaded(q, tokens, inside, width, WIDTH), loaded(grad, tokens, inside, wide, WIDE)
    Q2 = Q
    if FORM == "modulus":
        Q2 = loaded(q2, tokens, inside, width, WIDTH)
    top, change = tl.load(lse + tokens, inside, float("inf")), tl.load(delta + tokens, inside, 0.0)
    c_i, drawn = None, None
    if decay is not None:
        middle = tl.load(decay + here * slots + past + start)
        c_i = (tl.load(decay + here * slots + past + i, inside, 0.0) - middle).to(tl.float32)
    if rows is not None:
        drawn = tl.load(rows + tokens, inside, 0)
    result, result2 = tl.zeros([SIZE, WIDTH], tl.float32), tl.zeros([SIZE, WIDTH], tl.float32)
    falls = tl.zeros([SIZE], tl.float32)
    f, e, w = tl.arange(0, WIDTH), tl.arange(0, WIDE), tl.arange(0, 2 * SIZE)
    begin = tl.maximum(past + start - behind, 0) // SIZE * SIZE
    end = tl.minimum(slots, past + start + SIZE + ahead)
    for at in range(begin, end, SIZE):
        j = at + tl.arange(0, SIZE)
        held = (row * (heads // group) + head // group) * slots + j
        d = past + i[:, None] - j[None, :]
        first = past + start - at - (SIZE - 1) - lowest
        K, V = loaded(k, held, j < slots, width, WIDTH), loaded(v, held, j < slots, wide, WIDE)
        c_j = None
        if decay is not None:
            c_j = (tl.load(decay + here * slots + j, j < slots, 0.0) - middle).to(tl.float32)
        p, ds, da, db, positive = slopes_of(
            Q, Q2, Y, K, V, i, j, d, first, here, row, head, c_i, c_j, drawn, top, change, lookback, padding, bias,
            factor, keys, values, columns, threshold, grown, bias_step, factor_step, keys_step, values_step, scale,
            lowest, count, time, slots, width, wide, behind, ahead, FORM, SIZE, WIDTH, WIDE,
        )  # fmt: skip
        result = product(da.to(K.dtype), K, result)
        if FORM == "modulus":
            result2 = product(db.to(K.dtype), K, result2)
        if decay is not None:
            falls += tl.sum(ds, 1)
        if (first < count) & (first + 2 * SIZE > 0):
            place = first + w
            inside_table = (place >= 0) & (place < count)
            if dbias is not None:
                tl.atomic_add(dbias + head * bias_step + place, tl.sum(skewed(ds, SIZE), 0), inside_table)
            if dfactor is not None:
                tl.atomic_add(
                    dfactor + head * factor_step + place, tl.sum(skewed(ds * positive, SIZE), 0), inside_table
                )
            if keys is not None:
                lean = (skewed(ds, SIZE) * scale).to(Q.dtype)
                result = product(lean, near(keys + head * keys_step, first, count, width, SIZE, WIDTH), result)
                if dkeys is not None:
                    part = product(tl.trans(lean), Q, tl.zeros([2 * SIZE, WIDTH], tl.float32))
                    where = dkeys + head * keys_step + place[:, None] * width + f[None, :]
                    tl.atomic_add(where, part, inside_table[:, None] & (f < width)[None, :])
            if dvalues is not None:
                part = product(tl.trans(skewed(p, SIZE).to(Y.dtype)), Y, tl.zeros([2 * SIZE, WIDE], tl.float32))
                where = dvalues + head * values_step + place[:, None] * wide + e[None, :]
                tl.atomic_add(where, part, inside_table[:, None] & (e < wide)[None, :])
    stored = tokens[:, None] * width + f[None, :], inside[:, None] & (f < width)[None, :]
    tl.store(dq + stored[0], result, stored[1])
    if FORM == "modulus":
        tl.store(dq2 + stored[0], result2, stored[1])
    if ddecay is not None:
        tl.atomic_add(ddecay + here * slots + past + i, falls, inside)


@triton.jit
def backward_keys(
    q, q2, k, v, grad, dk, dv, lse, delta, lookback, padding, bias, factor, keys, values, decay, rows, columns,
    threshold, grown, ddecay, bias_step, factor_step, keys_step, values_step, scale, lowest, count, heads, group, time,
    slots, width, wide, behind, ahead,
    FORM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``SIZE`` keys and values of one key head, over all query heads that read it."""
    of_keys, at = tile(slots, SIZE)
    kv_heads, past = heads // group, slots - time
    row, j = of_keys // kv_heads, at + tl.arange(0, SIZE)
    held = of_keys * slots + j
    K, V = loaded(k, held, j < slots, width, WIDTH), loaded(v, held, j < slots, wide, WIDE)
    result_k, result_v = tl.zeros([SIZE, WIDTH], tl.float32), tl.zeros([SIZE, WIDE], tl.float32)
    begin = tl.maximum(at - ahead - past, 0) // SIZE * SIZE
    end = tl.minimum(time, at + SIZE + behind - past)
    for member in range(group):
        head = of_keys % kv_heads * group + member
        here = row * heads + head
        falls = tl.zeros([SIZE], tl.float32)
        for start in range(begin, end, SIZE):
            i = start + tl.arange(0, SIZE)
            tokens, inside = here * time + i, i < time
            Q, Y = loaded(q, tokens, inside, width, WIDTH), loaded(grad, tokens, inside, wide, WIDE)
            Q2 = Q
            if FORM == "modulus":
                Q2 = loaded(q2, tokens, inside, width, WIDTH)
            top, change = tl.load(lse + tokens, inside, float("inf")), tl.load(delta + tokens, inside, 0.0)
            c_i, c_j, drawn = None, None, None
            if decay is not None:
                middle = tl.load(decay + here * slots + past + start)
                c_i = (tl.load(decay + here * slots + past + i, inside, 0.0) - middle).to(tl.float32)
                c_j = (tl.load(decay + here * slots + j, j < slots, 0.0) - middle).to(tl.float32)
            if rows is not None:
                drawn = tl.load(rows + tokens, inside, 0)
            d = past + i[:, None] - j[None, :]
            first = past + start - at - (SIZE - 1) - lowest
            p, ds, da, db, _ = slopes_of(
                Q, Q2, Y, K, V, i, j, d, first, here, row, head, c_i, c_j, drawn, top, change, lookback, padding, bias,
                factor, keys, values, columns, threshold, grown, bias_step, factor_step, keys_step, values_step, scale,
                lowest, count, time, slots, width, wide, behind, ahead, FORM, SIZE, WIDTH, WIDE,
            )  # fmt: skip
            result_v = product(tl.trans(p.to(Y.dtype)), Y, result_v)
            result_k = product(tl.trans(da.to(Q.dtype)), Q, result_k)
            if FORM == "modulus":
                result_k = product(tl.trans(db.to(Q.dtype)), Q2, result_k)
            falls += tl.sum(ds, 0)
        if ddecay is not None:
            tl.atomic_add(ddecay + here * slots + j, -falls, j < slots)
    f, e = tl.arange(0, WIDTH), tl.arange(0, WIDE)
    tl.store(dk + held[:, None] * width + f[None, :], result_k, (j < slots)[:, None] & (f < width)[None, :])
    tl.store(dv + held[:, None] * wide + e[None, :], result_v, (j < slots)[:, None] & (e < wide)[None, :])


# The operators.

_Call = tuple[
    Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
    Tensor | None, Tensor | None, int, int, int, float, str, float, int,
]  # fmt: skip
_ARGUMENTS = (
    "Tensor q, Tensor? q2, Tensor k, Tensor v, Tensor? bias, Tensor? factor, Tensor? keys, Tensor? values, "
    "Tensor? decay, Tensor? lookback, Tensor? padding, SymInt behind, SymInt ahead, SymInt lowest, float scale, "
    "str form, float p, SymInt seed"
)
_LEARNT = 9
"""How many of the arguments have gradients: the first ones."""


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v] and the log-sum-exps [batch, q_heads, time], without a sink.

    Errors: ``KinformerError`` for float64 and for tensors on a CPU that nothing interprets.
    """
    if q.dtype == torch.float64:
        raise KinformerError("attention: impl='triton' does not take float64; use impl='chunked'.")
    if q.device.type == "cpu" and not INTERPRETED:
        raise KinformerError(
            "attention: impl='triton' runs on a GPU, but the tensors are on the CPU; use impl='chunked' there, or set "
            "TRITON_INTERPRET=1 before Python starts to have the kernels interpreted."
        )
    time, slots, relative = q.shape[2], k.shape[2], scoring.relative
    # Without a pattern, where there may be more queries than keys, distances are 1 - time .. slots - 1.
    behind, ahead = (slots, time) if visibility.pattern is None else limits(visibility, time, slots)
    bias = factor = keys = values = None
    lowest = 0
    if relative is not None:
        lowest, bias, factor, keys, values, shift = relative
        if keys is not None and shift is not None:  # (q + shift) . keys[d] is a bias beside q . keys[d]
            shifted = scoring.scale * (shift @ keys.mT).squeeze(-2)
            bias = shifted if bias is None else bias + shifted
        bias, factor = (None if one is None else one.float() for one in (bias, factor))
        tables = [one for one in (bias, factor, keys, values) if one is not None]
        assert all(len(one) in (1, q.shape[1]) and one.shape[1] == tables[0].shape[1] for one in tables)
    a, b = complex_queries(q) if scoring.form == "modulus" else (q, None)
    whole = visibility.whole or visibility.pattern is None
    (p, seed), positions = scoring.dropout or (0.0, 0), None if whole else visibility.positions
    check_reverse("Triton's attention", q, k, v, bias, factor, keys, values, scoring.decay)
    same = [None if one is None else one.to(q.dtype) for one in (keys, values)]
    return Attended(
        *_forward(
            a, b, k, v, bias, factor, *same, scoring.decay, positions, visibility.key_padding_mask, behind, ahead,
            lowest, scoring.scale, scoring.form, p, seed,
        )
    )  # fmt: skip


def size_of(width: int, dtype: torch.dtype) -> int:
    """Return the queries, and the keys, of a tile whose operands are ``width`` wide."""
    return max(LEAST, min(64, 8192 // (side(width) * dtype.itemsize)))


class _Work:
    """One call's operands as the kernels take them."""

    def __init__(self, *call: *_Call) -> None:
        q, q2, k, v, *tables, decay, lookback, padding, behind, ahead, lowest, scale, form, p, seed = call
        self.q, self.q2, self.k, self.v = (None if one is None else one.contiguous() for one in (q, q2, k, v))
        self.tables = [None if one is None else one.contiguous() for one in tables]
        (self.batch, self.heads, self.time, width), slots, wide = q.shape, k.shape[2], v.shape[3]
        self.slots, self.kv_heads = slots, k.shape[1]
        rows = columns = None
        if p:
            counts = (torch.arange(n, device=q.device) for n in (self.batch * self.heads, self.time, slots))
            rows, columns = dropout_words(seed, *counts)
        count = max((one.shape[1] for one in self.tables if one is not None), default=0)
        steps = [0 if one is None or len(one) == 1 else one[0].numel() for one in self.tables]
        padding = None if padding is None else padding.to(torch.int8).contiguous()
        lookback = None if lookback is None else lookback.contiguous()
        decay = None if decay is None else decay.contiguous()
        threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
        self.request = lookback, padding, *self.tables, decay, rows, columns, threshold, 1 / (1 - p)
        self.sizes = (
            *steps, scale, lowest, count, self.heads, self.heads // self.kv_heads, self.time, slots, width, wide,
            behind, ahead,
        )  # fmt: skip
        size = size_of(max(width, wide), q.dtype)
        self.by_queries = (triton.cdiv(self.time, size) * self.batch * self.heads,)
        self.by_keys = (triton.cdiv(slots, size) * self.batch * self.kv_heads,)
        self.constants: dict[str, Any] = {"FORM": form, "SIZE": size, "WIDTH": side(width), "WIDE": side(wide)}


@torch.library.custom_op(
    "kinformer::triton_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)"
)
def _forward(*call: *_Call) -> tuple[Tensor, Tensor]:
    work, q, v = _Work(*call), call[0], call[3]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        forward[work.by_queries](
            work.q, work.q2, work.k, work.v, out, lse, *work.request, *work.sizes, **work.constants
        )  # fmt: skip
    return out, lse


@_forward.register_fake
def _(*call: *_Call) -> tuple[Tensor, Tensor]:
    q, v = call[0], call[3]
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "kinformer::triton_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> "
    f"({', '.join(['Tensor'] * _LEARNT)})",
)
def _backward(grad: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *call: *_Call) -> tuple[Tensor, ...]:
    """Return the gradients of q, q2, k, v, the tables and the decay, empty ones for absent arguments."""
    work, learnt = _Work(*call), cast("tuple[Any, ...]", call[:_LEARNT])
    q, q2, k, v, *others = learnt
    dq, dk, dv = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
    dq2 = None if q2 is None else torch.empty_like(dq)
    summed = [None if one is None else one.new_zeros(one.shape, dtype=torch.float32) for one in others]
    *tables, ddecay = summed
    delta = (grad.float() * out).sum(-1) - grad_lse  # dS = P * (dP - delta)
    top = lse.masked_fill(lse == -torch.inf, torch.inf)  # so that P is 0 where a query sees nothing
    grad = grad.to(q.dtype).contiguous()
    with torch.cuda.device_of(q):
        inputs = work.q, work.q2, work.k, work.v, grad
        backward_queries[work.by_queries](
            *inputs, dq, dq2, top, delta, *work.request, *tables, ddecay, *work.sizes, **work.constants
        )
        backward_keys[work.by_keys](
            *inputs, dk, dv, top, delta, *work.request, ddecay, *work.sizes, **work.constants
        )  # fmt: skip
    rest = (q.new_empty(0) if total is None else total.to(one.dtype) for total, one in zip(summed, others, strict=True))
    return dq, q.new_empty(0) if dq2 is None else dq2, dk, dv, *rest


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    like = arguments[0]
    inputs = arguments[4 : 4 + _LEARNT]
    return tuple(like.new_empty(0) if one is None else one.new_empty(one.shape) for one in inputs)


def _save(ctx: Context, inputs: _Call, output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.plain = inputs[: _LEARNT + 2], inputs[_LEARNT + 2 :]
    ctx.save_for_backward(*output, *cast("tuple[Tensor | None, ...]", tensors))


@first_order("Triton's attention")
def _differentiate(
    ctx: Context, saved: tuple[Tensor | None, ...], grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    gradients = _backward(grad_out, grad_lse, *saved, *ctx.plain)
    present = [one is not None for one in saved[2 : 2 + _LEARNT]]
    learnt = (one if there else None for one, there in zip(gradients, present, strict=True))
    return *learnt, *[None] * (2 + len(ctx.plain))


_forward.register_autograd(_differentiate, setup_context=_save)
spare_operators(_forward, _backward)


def _pairs(q: Tensor, k: Tensor, behind: int, ahead: int) -> int:
    """Return how many pairs of queries and keys a band has, over all heads."""
    time, slots = q.shape[2], k.shape[2]
    past = slots - time
    seen = sum(max(0, min(slots, past + i + ahead + 1) - max(0, past + i - behind)) for i in range(time))
    return q.shape[0] * q.shape[1] * seen


def _flops(q: Tensor, q2: Tensor | None, k: Tensor, v: Tensor, *rest: Any, of_q: int, of_v: int) -> int:
    keys, values, behind, ahead = rest[2], rest[3], rest[7], rest[8]
    products_q = of_q * (1 + (q2 is not None) + 2 * (keys is not None))  # a table's rows are twice a tile's keys
    products_v = of_v * (1 + 2 * (values is not None))
    return 2 * _pairs(q, k, behind, ahead) * (products_q * q.shape[3] + products_v * v.shape[3])


@register_flop_formula(torch.ops.kinformer.triton_attention, get_raw=True)
def _forward_flops(*call: *_Call, **_: object) -> int:
    return _flops(*call, of_q=1, of_v=1)


@register_flop_formula(torch.ops.kinformer.triton_attention_backward, get_raw=True)
def _backward_flops(*arguments: Any, **_: object) -> int:
    # Both kernels compute S and dP again; then dQ and dK, and dV.
    return _flops(*arguments[4:], of_q=4, of_v=3)
