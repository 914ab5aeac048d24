"""Linear attention block by block: quadratic inside a block, a running state between blocks.

With S, z the state before a block, Q, K, V its tokens and P = tril(Q K^T), the block gives

    out = (P V + Q S) / (P 1 + Q z + eps),    S <- S + K^T V,    z <- z + K^T 1

(Katharopoulos et al. 2020, eq. 9-12). The backward runs their cumulative gradients (eq. 13-15) in the same way: with
Y the gradient of the numerator and g that of the denominator, the gradients of S and z after a block, dS and dz, give

    dP = tril(Y V^T + g 1^T),   dQ = dP K + Y S^T + g z^T,   dK = dP^T Q + V dS^T + 1 dz^T,   dV = P^T Y + K dS

and dS <- dS + Q^T Y, dz <- dz + Q^T g run from the last block to the first. Only the inputs and the state before every
tile are saved for it. A decay puts its factors to Q, K, P and S (see ``blocks``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
from kinformer.kernels.linear.sequence import LinearSequence
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.derivatives import Context, Gradients, first_order


def chunked(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``."""
    q, k, v, log_decay, eps, reset = sequence
    cast = operand_dtype(q)
    if cast is not None:
        with no_autocast(q.device):
            out, s, z = chunked(sequence._replace(q=q.to(cast), k=k.to(cast), v=v.to(cast)), s, z)
            return out.to(v.dtype), s, z
    if q.shape[2] == 1:
        return _step(sequence, s, z)
    dtype = product_dtype(q, k, v)
    accumulator = accumulator_dtype(q, k, v)
    log_decay = None if log_decay is None else log_decay.to(accumulator)
    state = s.to(accumulator), z.to(accumulator)
    out, s, z = _Chunked.apply(q.to(dtype), k.to(dtype), v.to(dtype), *state, log_decay, eps, reset)
    return out.to(v.dtype), s, z


def _step(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Absorb one token by the recurrence, in the dtype of the state."""
    q, k, v, log_decay, eps, reset = sequence
    dtype = v.dtype
    if q.dtype != s.dtype or k.dtype != s.dtype or dtype != s.dtype:
        accumulator = accumulator_dtype(q, k, v)
        q, k, v, s, z = (x.to(accumulator) for x in (q, k, v, s, z))
    if reset is not None:
        fresh = reset[:, :, None]
        s, z = s.masked_fill(fresh[..., None], 0), z.masked_fill(fresh, 0)
    if log_decay is not None:
        factor = log_decay.to(s.dtype).exp().squeeze(2) if log_decay.dim() == 4 else log_decay.to(s.dtype).exp()
        s, z = s * factor.unsqueeze(-1), z * factor
    # S_t = a_t S_(t-1) + k_t v_t^T, z_t = a_t z_(t-1) + k_t
    s = torch.addcmul(s, k.mT, v)
    z = z + k.squeeze(2)
    out = q @ s
    if eps is not None:
        out = out / (q @ z.unsqueeze(-1) + eps)
    return out.to(dtype), s, z


class _Chunked(torch.autograd.Function):
    """The blockwise sums with a backward of their own: q, k, v in the dtype of the products, s, z and
    log_decay in that of the accumulators."""

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Tensor,
        z: Tensor,
        *rest: *tuple[Tensor | None, float | None, Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequence = LinearSequence(q, k, v, *rest)
        out, last_s, last_z = torch.empty_like(v), s.clone(), z.clone()
        states: list[Tensor] = []
        for batch, time in tiles(q, v):
            before = last_s[batch].clone(), last_z[batch].clone()
            out[batch, :, time], last_s[batch], last_z[batch] = _absorb(sequence.part(batch, time), *before)
            states.extend(before)
        ctx.eps = sequence.eps
        ctx.save_for_backward(q, k, v, sequence.log_decay, sequence.reset, *states)
        return out, last_s, last_z

    @staticmethod
    @first_order("chunked linear attention")
    def backward(ctx: Context, saved: Any, grad_out: Tensor, grad_s: Tensor, grad_z: Tensor) -> Gradients:
        q, k, v, log_decay, reset = saved[:5]
        states = list(saved[5:])  # Dynamo of PyTorch 2.11 takes a starred name for a tuple
        sequence = LinearSequence(q, k, v, log_decay, ctx.eps, reset)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dg = torch.empty_like(log_decay) if ctx.needs_input_grad[5] else None
        ds, dz = grad_s.clone(), grad_z.clone()
        for batch, time in reversed(tiles(q, v)):
            at = batch, slice(None), time
            z, s = states.pop(), states.pop()
            part, after = sequence.part(batch, time), (ds[batch], dz[batch])
            grads = _gradients(part, (s, z), grad_out[at], after, dg is not None)
            dq[at], dk[at], dv[at], ds[batch], dz[batch], change = grads
            if dg is not None:
                dg[at] = change
        return dq, dk, dv, ds, dz, dg, None, None


def _absorb(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, and S and z after the tile."""
    q, k, v, log_decay, eps, reset = sequence
    blocks = cut(q, reset, log_decay)
    Q, K, V = blocks.read(blocks.split(q)), blocks.written(blocks.split(k)), blocks.split(v)
    S, Z, s, z = _states(blocks, K, V, s, z)
    P = blocks.scores(Q, K)
    Q_enter = gate(Q, blocks.enter)
    # (P V + Q S), then divided by (P 1 + Q z + eps)
    out = torch.bmm(P, V).baddbmm_(Q_enter, S)
    if eps is not None:
        out.div_(_divisor(blocks, P, Q_enter, Z, eps))
    return blocks.join(out), s, z


def _gradients(
    sequence: LinearSequence,
    before: tuple[Tensor, Tensor],
    grad_out: Tensor,
    after: tuple[Tensor, Tensor],
    learns: bool,
) -> tuple[Any, ...]:
    """Return the gradients of q, k, v, of S and z before the tile and, if it ``learns``, of log_decay, from those of
    the outputs and of S and z after it (``after``); ``before``: S and z before it."""
    q, k, v, log_decay, eps, reset = sequence
    (s, z), (grad_s, grad_z) = before, after
    blocks = cut(q, reset, log_decay)
    Q, K = blocks.read(blocks.split(q)), blocks.written(blocks.split(k))
    V, Y = blocks.split(v), blocks.split(grad_out)
    S, Z, last_s, last_z = _states(blocks, K, V, s, z)
    Q_enter = gate(Q, blocks.enter)
    P = blocks.scores(Q, K)
    g = None
    if eps is not None:
        divisor = _divisor(blocks, P, Q_enter, Z, eps)
        # From here on Y is the gradient of the numerator: d(N / D) / dN = 1 / D.
        Y = (Y / divisor).to(q.dtype)
    dQ = torch.bmm(Y, S.mT)
    dP = torch.bmm(Y, V.mT)
    if eps is not None:
        # g = -(Y . numerator) / D, the gradient of D; Y . (P V + Q S) needs no copy of the outputs.
        g = (P * dP).sum(-1, keepdim=True).add_((Q_enter * dQ).sum(-1, keepdim=True)).div_(-divisor)
        dQ.addcmul_(g, Z.to(dQ.dtype))
        dP.add_(g)
    dP = blocks.hide_(dP)
    dQ = blocks.add_to_rows_(gate(dQ, blocks.enter), dP, K)
    dS = blocks.by_row(torch.bmm(Q_enter.mT, Y))
    dS, grad_s = scan(dS, grad_s.flatten(0, 1), blocks.keep, blocks.late, reverse=True)
    grad_s = blocks.initial(grad_s)
    dZ, grad_z = _normaliser_gradient(blocks, Q_enter, g, grad_z)
    change = None
    dS = dS.flatten(0, 1)
    if learns:
        ended = _ended(blocks, S, last_s.flatten(0, 1)).mul_(dS).sum(-1)
        ended = ended + (_ended(blocks, Z, last_z.flatten(0, 1).unsqueeze(1)) * dZ).squeeze(1)
    dS = dS.to(q.dtype)
    dK = torch.bmm(V, dS.mT)
    dK.add_(dZ)
    dK = blocks.add_to_columns_(gate(dK, blocks.leave), dP, Q)
    dV = torch.bmm(gate(K, blocks.leave), dS).baddbmm_(P.mT, Y)
    if learns and log_decay is not None:
        change = blocks.decay_gradient(Q.to(ended.dtype) * dQ - K.to(ended.dtype) * dK, ended)
        change = change if log_decay.dim() == 4 else change.squeeze(-1)
    gradients = (blocks.join(x) for x in (blocks.read(dQ), blocks.written(dK), dV))
    return *gradients, grad_s.view(s.shape), grad_z.view(z.shape), change


def _divisor(blocks: SequenceBlocks, P: Tensor, Q: Tensor, Z: Tensor, eps: float) -> Tensor:
    """Return q . z + eps [rows * count, size, 1]; 1 where the last block was filled up."""
    divisor = P.sum(-1, dtype=Z.dtype).add_((Q * Z).sum(-1)).add_(eps)
    divisor.view(blocks.rows, -1)[:, blocks.time :] = 1
    return divisor.unsqueeze(-1)


def _states(
    blocks: SequenceBlocks, K: Tensor, V: Tensor, s: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return S [rows * count, features, head_dim] and z [rows * count, 1, features]
    before each block; both after the last."""
    K = gate(K, blocks.leave)
    S, last_s = scan(blocks.by_row(torch.bmm(K.mT, V)), blocks.initial(s.flatten(0, 1)), blocks.keep, blocks.late)
    added, before = blocks.by_row(K.sum(1, keepdim=True, dtype=z.dtype)), blocks.initial(z.flatten(0, 1).unsqueeze(2))
    Z, last_z = scan(added, before.mT, _transposed(blocks.keep), _transposed(blocks.late))
    return S.flatten(0, 1).to(K.dtype), Z.flatten(0, 1), last_s.view(s.shape), last_z.view(z.shape)


def _normaliser_gradient(blocks: SequenceBlocks, Q: Tensor, g: Tensor | None, grad_z: Tensor) -> tuple[Tensor, Tensor]:
    """Return dz, the gradient of z after each block [rows * count, 1, features], and that of the initial z."""
    last = grad_z.flatten(0, 1).unsqueeze(1)
    if g is None:
        g = Q.new_zeros(Q.shape[0], Q.shape[1], 1)
    added = blocks.by_row((Q * g).sum(1, keepdim=True, dtype=last.dtype))
    dZ, first = scan(added, last, _transposed(blocks.keep), _transposed(blocks.late), reverse=True)
    return dZ.flatten(0, 1), blocks.initial(first.mT).mT


def _transposed(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.mT


def _ended(blocks: SequenceBlocks, states: Tensor, last: Tensor) -> Tensor:
    """Return states [rows * count, ...] after each block, before what a fold lets decay of them, from those before each
    and the last, in the dtype of ``last``."""
    rows = blocks.by_row(states)[:, 1:].to(last.dtype)
    after = torch.cat([rows, last.unsqueeze(1)], dim=1)
    if blocks.late is not None:
        after = after / (blocks.late if after.shape[-2] > 1 else blocks.late.mT)
    return after.flatten(0, 1)
