"""Linear attention block by block: quadratic inside a block, a running state between blocks.

With S, z the state before a block, Q, K, V its tokens and P = tril(Q K^T), the block gives

    out = (P V + Q S) / (P 1 + Q z + eps),    S <- S + K^T V,    z <- z + K^T 1

(Katharopoulos et al. 2020, eq. 9-12). The backward runs their cumulative gradients (eq. 13-15) in the same way: with
Y the gradient of the numerator and g that of the denominator, the gradients of S and z after a block, dS and dz, give

    dP = tril(Y V^T + g 1^T),   dQ = dP K + Y S^T + g z^T,   dK = dP^T Q + V dS^T + 1 dz^T,   dV = P^T Y + K dS

and dS <- dS + Q^T Y, dz <- dz + Q^T g run from the last block to the first. Only the inputs and the state before every
tile are kept for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kinformer.core.autocast import no_autocast
from kinformer.core.derivatives import first_order
from kinformer.kernels.linear.blocks import (
    SequenceBlocks,
    accumulator_dtype,
    cut,
    gate,
    operand_dtype,
    product_dtype,
    scan,
    tiles,
)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``."""
    cast = operand_dtype(q)
    if cast is not None:
        with no_autocast(q.device):
            out, s, z = chunked(q.to(cast), k.to(cast), v.to(cast), s, z, eps, reset)
            return out.to(v.dtype), s, z
    if q.shape[2] == 1:
        return _step(q, k, v, s, z, eps, reset)
    dtype = product_dtype(q, k, v)
    accumulator = accumulator_dtype(q, k, v)
    out, s, z = _Chunked.apply(q.to(dtype), k.to(dtype), v.to(dtype), s.to(accumulator), z.to(accumulator), eps, reset)
    return out.to(v.dtype), s, z


def _step(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One token, in the dtype of the state."""
    dtype = v.dtype
    if q.dtype != s.dtype or k.dtype != s.dtype or dtype != s.dtype:
        accumulator = accumulator_dtype(q, k, v)
        q, k, v, s, z = (x.to(accumulator) for x in (q, k, v, s, z))
    if reset is not None:
        fresh = reset[:, :, None]
        s, z = s.masked_fill(fresh[..., None], 0), z.masked_fill(fresh, 0)
    s = torch.addcmul(s, k.mT, v)
    z = z + k.squeeze(2)
    out = q @ s
    if eps is not None:
        out = out / (q @ z.unsqueeze(-1) + eps)
    return out.to(dtype), s, z


class _Chunked(torch.autograd.Function):
    """q, k, v in the dtype of the products, s and z in that of the accumulators."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, last_s, last_z = torch.empty_like(v), s.clone(), z.clone()
        begun: list[Tensor] = []
        for batch, time in tiles(q, v):
            at = batch, slice(None), time
            before = last_s[batch].clone(), last_z[batch].clone()
            flags = None if reset is None else reset[batch, time]
            out[at], last_s[batch], last_z[batch] = _absorb(q[at], k[at], v[at], *before, eps, flags)
            begun.extend(before)
        ctx.eps = eps
        ctx.save_for_backward(q, k, v, reset, *begun)
        return out, last_s, last_z

    @staticmethod
    @first_order("chunked linear attention")
    def backward(ctx: Any, saved: Any, grad_out: Tensor, grad_s: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, reset, *begun = saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ds, dz = grad_s.clone(), grad_z.clone()
        for batch, time in reversed(tiles(q, v)):
            at = batch, slice(None), time
            z, s = begun.pop(), begun.pop()
            flags = None if reset is None else reset[batch, time]
            dq[at], dk[at], dv[at], ds[batch], dz[batch] = _gradients(
                (q[at], k[at], v[at], s, z, ctx.eps, flags), grad_out[at], ds[batch], dz[batch]
            )
        return dq, dk, dv, ds, dz, None, None


def _absorb(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and S and z after the tile."""
    blocks = cut(q, reset)
    Q, K, V = blocks.split(q), blocks.split(k), blocks.split(v)
    S, Z, s, z = _states(blocks, K, V, s, z)
    P = blocks.hide_(torch.bmm(Q, K.mT))
    Q_enter = gate(Q, blocks.enter)
    out = torch.bmm(P, V).baddbmm_(Q_enter, S)
    if eps is not None:
        out.div_(_divisor(blocks, P, Q_enter, Z, eps))
    return blocks.join(out), s, z


def _gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float | None, Tensor | None],
    grad_out: Tensor,
    grad_s: Tensor,
    grad_z: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of S and z before the tile, from those of the outputs and of S and z after it."""
    q, k, v, s, z, eps, reset = inputs
    blocks = cut(q, reset)
    Q, K, V, Y = blocks.split(q), blocks.split(k), blocks.split(v), blocks.split(grad_out)
    S, Z, _, _ = _states(blocks, K, V, s, z)
    Q_enter = gate(Q, blocks.enter)
    P = blocks.hide_(torch.bmm(Q, K.mT))
    g = None
    if eps is not None:
        divisor = _divisor(blocks, P, Q_enter, Z, eps)
        Y = (Y / divisor).to(q.dtype)
    dQ = torch.bmm(Y, S.mT)
    dP = torch.bmm(Y, V.mT)
    if eps is not None:
        g = (P * dP).sum(-1, keepdim=True).add_((Q_enter * dQ).sum(-1, keepdim=True)).div_(-divisor)
        dQ.addcmul_(g, Z.to(dQ.dtype))
        dP.add_(g)
    dQ = gate(dQ, blocks.enter).baddbmm_(blocks.hide_(dP), K)
    dS, grad_s = scan(blocks.by_row(torch.bmm(Q_enter.mT, Y)), grad_s.flatten(0, 1), blocks.keep, reverse=True)
    dS = dS.flatten(0, 1).to(q.dtype)
    dK = torch.bmm(V, dS.mT)
    grad_z = _add_normaliser_gradient(blocks, dK, Q_enter, g, grad_z)
    dK = gate(dK, blocks.leave).baddbmm_(dP.mT, Q)
    dV = gate(torch.bmm(K, dS), blocks.leave).baddbmm_(P.mT, Y)
    return blocks.join(dQ), blocks.join(dK), blocks.join(dV), grad_s.view(s.shape), grad_z.view(z.shape)


def _divisor(blocks: SequenceBlocks, P: Tensor, Q: Tensor, Z: Tensor, eps: float) -> Tensor:
    """q . z + eps [rows * count, size, 1]; 1 where the last block was filled up."""
    divisor = P.sum(-1, dtype=Z.dtype).add_((Q * Z).sum(-1)).add_(eps)
    divisor.view(blocks.rows, -1)[:, blocks.time :] = 1
    return divisor.unsqueeze(-1)


def _states(
    blocks: SequenceBlocks, K: Tensor, V: Tensor, s: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S [rows * count, features, head_dim] and z [rows * count, 1, features] before each block; both after the last."""
    K = gate(K, blocks.leave)
    S, last_s = scan(blocks.by_row(torch.bmm(K.mT, V)), s.flatten(0, 1), blocks.keep)
    added = blocks.by_row(K.sum(1, keepdim=True, dtype=z.dtype))
    Z, last_z = scan(added, z.flatten(0, 1).unsqueeze(1), blocks.keep)
    return S.flatten(0, 1).to(K.dtype), Z.flatten(0, 1), last_s.view(s.shape), last_z.view(z.shape)


def _add_normaliser_gradient(blocks: SequenceBlocks, dK: Tensor, Q: Tensor, g: Tensor | None, grad_z: Tensor) -> Tensor:
    """Add dz, the gradient of z after each block, to every row of dK; returns that of the initial z."""
    last = grad_z.flatten(0, 1).unsqueeze(1)
    if g is None:
        g = Q.new_zeros(Q.shape[0], Q.shape[1], 1)
    added = blocks.by_row((Q * g).sum(1, keepdim=True, dtype=last.dtype))
    dZ, first = scan(added, last, blocks.keep, reverse=True)
    dK.add_(dZ.flatten(0, 1))
    return first
