"""Softmax attention by PyTorch's own kernels: ``scaled_dot_product_attention`` and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.core.pattern import ALL, SOME, Boxes, Pattern
from kinformer.kernels.band import interval, limits
from kinformer.kernels.block_sparse.plan import Interval
from kinformer.kernels.softmax import Attended, Scoring, Visibility, query_positions, with_sink
from kinformer.runtime.autograd import Context, check_reverse, first_order, transformed
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Softmax attention by torch's ``scaled_dot_product_attention``: bands and sets, with a dense mask where need be.
#
# out = softmax(scale * Q K^T + mask) V
#
# With a sink logit z, a key of value 0, torch's kernel for the CPU is called itself, as it returns L = logsumexp(S):
#
# out = softmax(S) V e^(L - L'),   L' = log(e^L + e^z)

Expressed = Literal["all", "causal", "masked"]


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v]; a query that sees nothing gives 0.

    torch aligns ``is_causal`` to the first slot, so ``is_causal`` equals our causal band only without a past.
    """
    time, slots = q.shape[2], k.shape[2]
    first, end = (0, slots) if visibility.pattern is None else interval(visibility, time, slots)
    how = expressed(visibility, time, slots)
    mask = _mask(visibility, q, first, end, slots) if how == "masked" else None
    if end - first < slots:
        k, v = k[:, :, first:end], v[:, :, first:end]
    if scoring.sink is not None:
        return Attended(_attend_with_sink(q, k, v, scoring.sink, mask, how == "causal", scoring.scale))
    width = v.shape[-1]
    if q.device.type == "cpu":  # which has dense products where values are narrower (``benchmarks/latent.py``)
        v = _widened(v, q.shape[-1])
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=how == "causal",
        scale=scoring.scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )
    if out.requires_grad and not torch.compiler.is_compiling() and not transformed():
        out = _Twice.apply(q, k, v, out, mask, how == "causal", scoring.scale)
    return Attended(out[..., :width])


class _Twice(torch.autograd.Function):
    """The output of PyTorch's kernel, with derivatives of every order.

    The kernel's own backward has no derivative. Where a gradient is to be differentiated again, the gradient comes
    from PyTorch's plain operations over all pairs instead; the kernel then gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, None, None, grad, None, None, None
        *inputs, mask = ctx.saved_tensors
        # Values may be a slice of the keys (MLA). Separate views keep this path out of the gradient of keys.
        q, k, v = (x.view_as(x) for x in inputs)
        # This operation adds its mask to the scores, also a mask of bools.
        mask = None if mask is None else _hidden(q, mask)
        wanted = [x for x in (q, k, v) if x.requires_grad]
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, mask, 0.0, ctx.causal, scale=ctx.scale, enable_gqa=bool(q.shape[1] != k.shape[1])
        )
        slopes = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return *(next(slopes) if x.requires_grad else None for x in (q, k, v)), None, None, None, None


def expressed(visibility: Visibility, time: int, slots: int) -> Expressed:
    """Return how PyTorch's kernel expresses the pattern: "all", "causal" or, by a dense mask, "masked"."""
    if visibility.key_padding_mask is not None:
        return "masked"
    if visibility.pattern is None:
        return "all"
    behind, ahead = limits(visibility, time, slots)
    if not visibility.whole and visibility.positions is not None:
        return "masked"
    if time == 1 and ahead >= 0 and behind >= 0:
        return "all"
    if behind < slots - 1:
        return "masked"
    if ahead >= time - 1:
        return "all"
    # ``is_causal`` aligns query 0 to slot 0, which equals our band only without a past.
    return "causal" if ahead == 0 and time == slots else "masked"


def _mask(visibility: Visibility, q: Tensor, first: int, end: int, slots: int) -> Tensor:
    """Return whether a query may see a slot, [batch or 1, 1, time or 1, end - first] bool."""
    if visibility.pattern is None:
        assert visibility.key_padding_mask is not None
        return ~visibility.key_padding_mask[:, None, None]
    time = q.shape[2]
    behind, ahead = limits(visibility, time, slots)
    query = slots - time + torch.arange(time, device=q.device)
    distance = query[:, None] - torch.arange(first, end, device=q.device)
    seen = ((distance <= behind) & (distance >= -ahead))[None, None]
    if not visibility.whole and visibility.positions is not None:
        seen = seen & (distance <= visibility.positions[:, None, :, None])
    if visibility.key_padding_mask is not None:
        seen = seen & ~visibility.key_padding_mask[:, None, None, first:end]
    return seen


def _hidden(q: Tensor, mask: Tensor) -> Tensor:
    """Return what hides the slots that ``mask`` does not mark, as numbers to add to scores."""
    return q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _widened(x: Tensor, width: int) -> Tensor:
    """Return x [..., features] with ``width`` features or more: PyTorch's kernel of the CPU has one width for queries,
    keys and values. Zero features do not change a score, and the caller cuts the extra columns of the output."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


_NAME = "PyTorch's attention with a sink logit"


def attend_short(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the output over the causal pairs of rows without a past, on a CPU.

    All pairs of a call are one product, hidden ones too: PyTorch's kernel and our tiles make many small products, and
    oneDNN sets up each of them again. Our tiles could replace this function: delete it when they take less than 1.02 of
    its time in the rows of gpt in ``small_steps.json`` (``benchmarks/small_steps.py``).
    """
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    wide = state_dtype(q.dtype)  # as everywhere, scores are not rounded to 16 bits
    hidden = q.new_full((q.shape[2], k.shape[2]), -torch.inf, dtype=wide).triu_(1)
    likely = torch.baddbmm(hidden, q_rows.to(wide), k_rows.to(wide).mT, alpha=scale).softmax(-1)
    return torch.bmm(likely.to(v.dtype), v_rows).view(q.shape)


def _attend_with_sink(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return the output beside ``sink`` [heads], on a CPU alone; ``mask`` marks the slots that a query sees."""
    if q.device.type != "cpu":
        raise KinformerError("attention: impl='sdpa' knows a sink logit on the CPU only; use impl='chunked'.")
    check_reverse(_NAME, q, k, v, sink)
    width, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_widened(x, widest) for x in (q, k, v))
    hidden = None if mask is None else _hidden(q, mask)
    out: Tensor = _ByKernel.apply(q, k, v, sink, hidden, causal, scale)
    return out[..., :width]


class _ByKernel(torch.autograd.Function):
    """The kernel's function of q, k, v and the sink [heads], with the gradient of all four.

    The kernel's own backward, given the output O beside the sink and L' for its log-sum-exp, recomputes P = e^(S - L')
    and uses dS = P * (dP - delta), delta = rowsum(dO * O). This is also correct beside a key of value 0: that key has
    dP = 0, and thus dz = -e^(z - L') delta.
    """

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.causal, ctx.scale = causal, scale
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        # Not `lse.dtype`: while PyTorch 2.11 captures a graph, `lse.dtype` is float32 for operands of any dtype.
        lse = lse.to(state_dtype(q.dtype))
        # If the mask hides every slot of a row, L is -inf: the output must be 0, whatever the kernel wrote there.
        lse = lse.nan_to_num(nan=-torch.inf, neginf=-torch.inf) if mask is not None else lse
        total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
        share = (lse - total).exp()[..., None].to(out.dtype)
        out = out * share if mask is None else torch.where(share > 0, out * share, 0)
        ctx.save_for_backward(q, k, v, sink, mask, out, total)
        return out

    @staticmethod
    @first_order(_NAME)
    def backward(ctx: Context, saved: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, mask, out, total = saved
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        dz = None
        if ctx.needs_input_grad[3]:
            delta = (grad * out).sum(-1, dtype=state_dtype(q.dtype))
            dz = -((sink.to(total.dtype)[:, None] - total).exp() * delta).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, dz, None, None, None


# Attention over the pairs of a pattern by PyTorch's FlexAttention: for a GPU, where it is compiled into one kernel.
#
#     out = softmax(score_mod(scale * Q K^T)) V over the pairs of mask_mod
#
# ``mask_mod`` is the pattern's ``allowed``, ``score_mod`` what distances add. Blocks of 128 x 128 pairs are sorted
# into empty, partial and full ones by the pattern's ``cover``; single pairs are looked at inside the kernel. On a CPU
# it runs uncompiled and without gradients, which is good for tests only.

_BLOCK = 128
_GRAPHS = 64
"""Number of patterns, shapes and dtypes to compile; beyond PyTorch's default of eight, it computes dense scores."""


def attend_flex(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v] of products plus a bias by distance.

    Errors: rows at different positions, or with a reset in mid-chunk; float64 on a GPU.
    """
    # Imported here, as PyTorch 2.14's module imports SymPy, which takes a second.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    assert visibility.pattern is not None
    if q.dtype == torch.float64 and q.device.type == "cuda":
        raise KinformerError("attention: impl='flex' does not take float64 on a GPU; use impl='chunked'.")
    past = k.shape[2] - q.shape[2]
    # Sequences that begin with the call do so at position 0, and the device need not be waited for.
    first = 0 if visibility.whole and not past else _first(query_positions(visibility, q, k.shape[2]))
    # Slots before ``oldest`` have negative positions: they hold no token of the sequence.
    oldest = max(0, past - first)
    interval = Interval(first - (past - oldest), first, first + q.shape[2])
    k, v = k[:, :, oldest:], v[:, :, oldest:]
    mask = _block_mask(visibility.pattern, interval, q.shape[1], str(q.device))
    run: Any = _compiled(flex_attention) if q.device.type == "cuda" else flex_attention
    padding = None if visibility.key_padding_mask is None else visibility.key_padding_mask[:, oldest:]
    with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        out, sums = run(
            q, k, v, score_mod=_score(scoring, past - oldest, padding, q.dtype), block_mask=mask, scale=scoring.scale,
            enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=scoring.sink is not None),
        )  # fmt: skip
    return with_sink(Attended(out, sums.lse), scoring.sink)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _first(positions: Tensor) -> int:
    offset = positions - torch.arange(positions.shape[1], device=positions.device)
    if not bool((offset == offset[0, 0]).all()):
        raise KinformerError(
            "attention: impl='flex' needs rows at equal positions that count up by one, "
            "but these differ or are reset; use impl='chunked'."
        )
    return int(positions[0, 0])


def _score(scoring: Scoring, past: int, padding: Tensor | None, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return the ``score_mod`` of a call: it adds the bias by distance, and -inf at padded keys."""
    relative = scoring.relative
    bias = None if relative is None else relative.bias
    if relative is None or bias is None:
        if padding is None:
            return None
        return lambda score, batch, head, query, key: torch.where(padding[batch, key], -torch.inf, score)
    lowest = relative.lowest
    bias = bias.to(torch.promote_types(dtype, torch.float32))  # the scores' type, which Triton adds no other to

    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = past + query - key - lowest
        inside = (index >= 0) & (index < bias.shape[1])
        row = head if bias.shape[0] > 1 else torch.zeros_like(head)
        score = torch.where(inside, score + bias[row, index.clamp(0, bias.shape[1] - 1)], score)
        return score if padding is None else torch.where(padding[batch, key], -torch.inf, score)

    return score


@lru_cache(maxsize=64)
def _block_mask(pattern: Pattern, interval: Interval, heads: int, device: str) -> BlockMask:
    """Sort the blocks of pairs into empty, partial and full ones (per head where heads differ) for ``BlockMask``."""
    from torch.nn.attention.flex_attention import BlockMask

    count = pattern.num_heads or 1
    covers = np.stack([_cover(pattern.at(head), interval) for head in range(count)])
    partial, full = (_indices(torch.from_numpy(covers == kind)) for kind in (SOME, ALL))

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        q, k = query + interval.query, key + interval.key
        seen = pattern.at(0).allowed(q, k)
        for other in range(1, count):
            seen = torch.where(head == other, pattern.at(other).allowed(q, k), seen)
        return seen & (q < interval.stop) & (k < interval.stop)

    lengths = interval.stop - interval.query, interval.stop - interval.key
    some, some_index, every, every_index = (x.to(device) for x in (*partial, *full))
    return BlockMask.from_kv_blocks(
        some, some_index, every, every_index, BLOCK_SIZE=_BLOCK, mask_mod=allowed, seq_lengths=lengths
    )


def _cover(pattern: Pattern, interval: Interval) -> np.ndarray:
    """Return the pattern's cover of all blocks, [query blocks, key blocks]."""
    q = np.arange(interval.query, interval.stop, _BLOCK)
    k = np.arange(interval.key, interval.stop, _BLOCK)
    low, key = (side.ravel() for side in np.meshgrid(q, k, indexing="ij"))
    high, key_high = (np.minimum(side + _BLOCK, interval.stop) - 1 for side in (low, key))
    # FlexAttention reads a full block without its mask, so a block that the edge cuts off counts as partial.
    whole = (high - low == _BLOCK - 1) & (key_high - key == _BLOCK - 1)
    cover = pattern.cover(Boxes(low, high, key, key_high))
    return np.where(whole, cover, np.minimum(cover, SOME)).reshape(len(q), len(k))


def _indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts [1, heads, query blocks] and indices [1, heads, query blocks, key blocks], chosen ones first."""
    order = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True)
    return chosen.sum(-1).to(torch.int32)[None], order.to(torch.int32)[None]
