"""Softmax attention whose keys and values go round the processes of a row (Liu, Zaharia and Abbeel 2023, Ring
Attention, 2310.01889), piece by piece joined by ``merge``.

At step d process r has the keys and values of stretch r - d; causal queries need none of later stretches, so none is
sent to them. The backward sends them round again and recomputes each piece's attention, so that one piece is held
at a time:

    w_d = exp(lse_d - lse),   d out_d = w_d d out,   d lse_d = w_d (d lse + d out . (out_d - out))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kinformer.core.contract import state_dtype
from kinformer.core.crossing import Crossing
from kinformer.core.pattern import Band
from kinformer.kernels.attention import attention
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.softmax import Attended, Scoring, Visibility, merge
from kinformer.runtime.autograd import Context

_EVERY = Band(ahead=None)
_Call = tuple[Visibility, Scoring, AttentionImpl]


def around(
    qkv: tuple[Tensor, Tensor, Tensor],
    visibility: Visibility,
    scoring: Scoring,
    impl: AttentionImpl,
    crossing: Crossing | None,
    lse: bool,
) -> Attended:
    """Return ``attention`` of q [batch, heads, time, head_dim] to k and v. With a ``crossing``, k and v belong to one
    stretch of a row, and the keys and values of earlier stretches go round the processes. Scores are dot products."""
    q, k, v = qkv
    local = attention(q, k, v, visibility, scoring, impl=impl, lse=lse or crossing is not None)
    if crossing is None:
        return local
    call = visibility, Scoring(scoring.scale, dropout=scoring.dropout), impl
    return merge(local, Attended(*_Around.apply(q, torch.cat([k, v], dim=-1), crossing, call)))


def _piece(q: Tensor, kv: Tensor, distance: int, call: Any) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of q over ``kv`` [batch, heads, time, width_k + width_v] of the stretch that stands
    ``distance`` before its own."""
    visibility, scoring, impl = call
    time, width = q.shape[2:]
    # Slot s of the piece holds position p - (i + distance * time - s), and a negative one is another sequence's.
    moved = visibility._replace(pattern=_EVERY, positions=visibility.positions - distance * time)
    k, v = kv.split([width, kv.shape[3] - width], dim=-1)
    out, lse = attention(q, k, v, moved, scoring, impl=impl, lse=True)
    assert lse is not None
    return out, lse


class _Around(torch.autograd.Function):
    """Output and log-sum-exp over the keys and values of earlier stretches."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, kv: Tensor, crossing: Crossing, call: _Call) -> tuple[Tensor, Tensor]:
        total = None
        for distance, piece in _pieces(kv, crossing):
            part = Attended(*_piece(q, piece, distance, call))
            total = part if total is None else merge(total, part)
        if total is None:  # the first stretch
            width = kv.shape[3] - q.shape[3]
            out = q.new_zeros(*q.shape[:3], width)
            total = Attended(out, q.new_full(q.shape[:3], -torch.inf, dtype=state_dtype(q.dtype)))
        assert total.lse is not None
        ctx.crossing, ctx.call = crossing, call
        ctx.save_for_backward(q, kv, *total)
        return total.out, total.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        crossing: Crossing = ctx.crossing
        d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv, memory_format=torch.contiguous_format)
        gradients = {}
        for distance, piece in _pieces(kv, crossing):
            with torch.enable_grad():
                query, piece = q.detach().requires_grad_(), piece.requires_grad_()
                out_d, lse_d = _piece(query, piece, distance, ctx.call)
                weight = torch.where(lse_d > -torch.inf, (lse_d - lse).exp(), lse_d.new_zeros(())).detach()
                along = (d_out * (out_d.detach() - out)).sum(-1).to(lse.dtype)
                upstream = [weight[..., None].to(d_out.dtype) * d_out, weight * (d_lse + along)]
                d_query, gradients[distance] = torch.autograd.grad([out_d, lse_d], [query, piece], upstream)
            d_q += d_query
        for distance in range(1, crossing.count):
            room = torch.empty_like(d_kv)
            if crossing.exchange(
                gradients.pop(distance, None), crossing.number - distance, room, crossing.number + distance
            ):
                d_kv += room
        return d_q, d_kv, None, None


def _pieces(kv: Tensor, crossing: Crossing) -> Iterator[tuple[int, Tensor]]:
    """Yield how far before this stretch each earlier one stands, nearest first, and its keys and values."""
    piece: Tensor | None = kv
    for distance in range(1, crossing.count):
        room = torch.empty_like(kv, memory_format=torch.contiguous_format) if distance <= crossing.number else None
        crossing.exchange(piece, crossing.number + 1, room, crossing.number - 1)
        piece = room
        if room is not None:
            yield distance, room
