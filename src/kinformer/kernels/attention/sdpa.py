"""Softmax attention by torch's ``scaled_dot_product_attention``: bands and sets, with a dense mask where need be.

out = softmax(scale * Q K^T + mask) V

With a sink logit z, a key of value 0, torch's kernel for the CPU is called itself, as it returns L = logsumexp(S):

out = softmax(S) V e^(L - L'),   L' = log(e^L + e^z)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.band.tiles import interval, limits
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility
from kinformer.runtime.derivatives import Context, check_reverse, first_order
from kinformer.runtime.errors import KinformerError

Expressed = Literal["all", "causal", "masked"]


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v]; a query that sees nothing gives 0.

    torch aligns ``is_causal`` to the first slot, so it stands for our causal band only where there is no past.
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
    return Attended(out[..., :width])


def expressed(visibility: Visibility, time: int, slots: int) -> Expressed:
    """Return how PyTorch's kernel expresses who sees whom: "all", "causal" or,
    by a dense mask over all pairs, "masked"."""
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
    # ``is_causal`` aligns query 0 to slot 0, which is our band only if there is no past.
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


def _widened(x: Tensor, width: int) -> Tensor:
    """Return x [..., features] with ``width`` features or more: PyTorch's kernel of the CPU has one width for queries,
    keys and values. Features of 0 change no score, and what they add to the output is cut off."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


_NAME = "PyTorch's attention with a sink logit"


def _attend_with_sink(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return the output beside ``sink`` [heads], on a CPU alone; ``mask`` is that of the slots seen."""
    if q.device.type != "cpu":
        raise KinformerError("attention: impl='sdpa' knows a sink logit on the CPU only; use impl='chunked'.")
    check_reverse(_NAME, q, k, v, sink)
    width, widest = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_widened(x, widest) for x in (q, k, v))
    hidden = None if mask is None else q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    out: Tensor = _WithSink.apply(q, k, v, sink, hidden, causal, scale)
    return out[..., :width]


class _WithSink(torch.autograd.Function):
    """The kernel's function of q, k, v and the sink [heads], with the gradient of all four.

    The kernel's own backward, given the output O beside the sink and L' for its log-sum-exp, recomputes P = e^(S - L')
    and uses dS = P * (dP - delta), delta = rowsum(dO * O): what is right beside a key of value 0. That key has dP = 0,
    and thus dz = -e^(z - L') delta.
    """

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        # Not `lse.dtype`: while PyTorch 2.11 captures a graph, that is float32 whatever the operands are.
        lse = lse.to(state_dtype(q.dtype))
        # A row of which the mask hides every slot has L = -inf and thus the output 0, whatever the kernel leaves there.
        lse = lse.nan_to_num(nan=-torch.inf, neginf=-torch.inf) if mask is not None else lse
        total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
        share = (lse - total).exp()[..., None].to(out.dtype)
        out = out * share if mask is None else torch.where(share > 0, out * share, 0)
        ctx.save_for_backward(q, k, v, sink, mask, out, total)
        ctx.causal, ctx.scale = causal, scale
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
