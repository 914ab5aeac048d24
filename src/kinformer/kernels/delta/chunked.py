"""The delta rule block by block, in the WY form of Yang et al. 2024 (arXiv 2406.06484, section 3).

Inside a block all tokens correct the memory W that the block began with. With K, Q, V, beta its tokens, E the keys that
they erase (K, unless they are given), A the strictly lower part of E K^T, P = tril(Q K^T) and R = (I + diag(beta)
A)^-1, the corrections U that the tokens write are

    U = R diag(beta) (V - E W),    out = Q W + P U,    W <- W + K^T U

In the backward, with dW the gradient of W after the block and dO the gradient of the outputs,

    G = R^T (P^T dO + K dW)        (so that dV = diag(beta) G),      dW <- dW + Q^T dO - E^T diag(beta) G

runs from the last block to the first; the rest are products inside blocks. Saved for it: the inputs and one W per
block. A decay puts its factors to Q, K, E, A, P and W (see ``linear.blocks``; Yang et al. 2025, arXiv 2412.06464,
section 3.3). If W is read early, the factors of E and A lack the token's decay (Hu et al. 2025, arXiv 2506.02475).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kinformer.kernels.linear.chunked import (
    SequenceBlocks,
    accumulator_dtype,
    cut,
    gate,
    operand_dtype,
    product_dtype,
    tiles,
)
from kinformer.kernels.linear.sequence import DeltaTokens
from kinformer.runtime.autograd import Context, first_order, no_autocast


def chunked(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final W; shapes as for ``delta_rule``."""
    q, k, v, beta, erase, log_decay, reset, early = tokens
    cast = operand_dtype(q)
    if cast is not None:
        erase = None if erase is None else erase.to(cast)
        narrow = tokens._replace(q=q.to(cast), k=k.to(cast), v=v.to(cast), beta=beta.to(cast), erase=erase)
        with no_autocast(q.device):
            out, state = chunked(narrow, state)
            return out.to(v.dtype), state
    if q.shape[2] == 1:
        return _step(tokens, state)
    dtype = product_dtype(q, k, v)
    accumulator = accumulator_dtype(q, k, v)
    erase, log_decay = (None if x is None else x.to(to) for x, to in ((erase, dtype), (log_decay, accumulator)))
    operands = q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype).unsqueeze(-1)
    out, state = _Chunked.apply(*operands, erase, log_decay, reset, early, state.to(accumulator))
    return out.to(v.dtype), state


def _step(tokens: DeltaTokens, w: Tensor) -> tuple[Tensor, Tensor]:
    """Absorb one token by the recurrence, in the dtype of the state."""
    q, k, v, beta, erase, log_decay, reset, early = tokens
    erase, dtype = k if erase is None else erase, v.dtype
    if any(x.dtype != w.dtype for x in (q, k, v, beta, erase)):
        accumulator = accumulator_dtype(q, k, v)
        q, k, v, beta, erase, w = (x.to(accumulator) for x in (q, k, v, beta, erase, w))
    if reset is not None:
        w = w.masked_fill(reset[:, :, None, None], 0)
    before = w
    if log_decay is not None:
        w = w * log_decay.to(w.dtype).exp().view(*w.shape[:2], -1, 1)
    # W <- W + k (beta (v - W^T e))^T, with rows for k, e and v
    w = torch.addcmul(w, k.mT, (v - erase @ (before if early else w)) * beta.unsqueeze(-1))
    return (q @ w).to(dtype), w


class _Chunked(torch.autograd.Function):
    """The blockwise rule with a custom backward: q, k, v, beta [batch, heads, time, 1] and erase in the dtype of the
    products, log_decay and w in the dtype of the accumulators."""

    @staticmethod
    def forward(ctx: Context, *arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, w = DeltaTokens(*arguments[:-1]), arguments[-1]
        out, last = torch.empty_like(tokens.v), w.clone()
        states = []
        for batch, time in tiles(tokens.q, tokens.v):
            out[batch, :, time], before, last[batch] = _absorb(tokens.part(batch, time), last[batch])
            states.append(before)
        ctx.early = tokens.early
        ctx.save_for_backward(*tokens[:7], *states)
        return out, last

    @staticmethod
    @first_order("the chunked delta rule")
    def backward(ctx: Context, saved: Any, grad_out: Tensor, grad_w: Tensor) -> tuple[Tensor | None, ...]:
        tokens, states = DeltaTokens(*saved[:7])._replace(early=ctx.early), list(saved[7:])
        learns = ctx.needs_input_grad[5]
        learned = (*tokens[:5], tokens.log_decay if learns else None)
        gradients = [None if x is None else torch.empty_like(x) for x in learned]
        dw = grad_w.clone()
        for batch, time in reversed(tiles(tokens.q, tokens.v)):
            at = batch, slice(None), time
            grads, dw[batch] = _gradients(tokens.part(batch, time), states.pop(), grad_out[at], dw[batch], learns)
            for gradient, item in zip(gradients, grads, strict=True):
                if gradient is not None and item is not None:
                    gradient[at] = item
        return *gradients, None, None, dw


def _absorb(tokens: DeltaTokens, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, W before every block [rows * count, features, head_dim], and W after the tile."""
    q, k, v, beta, erase, *_ = tokens
    blocks, reads = _cuts(tokens)
    Q, K, V, B = (blocks.split(x) for x in (q, k, v, beta))
    Q, K, E = _folded(blocks, Q, K, erase)
    _, inverse = _inverse(reads, E, K, B)
    # R diag(beta), so that U = (R diag(beta)) V - (R diag(beta) E) W.
    scaled = inverse * B.mT
    U, X = torch.bmm(scaled, V), torch.bmm(scaled, gate(E, reads.enter))
    W, last = _write(blocks, U, X, gate(K, blocks.leave), w)
    P = blocks.scores(Q, K)
    out = torch.bmm(P, U).baddbmm_(gate(Q, blocks.enter), W)
    return blocks.join(out), W, last.view(w.shape)


def _gradients(
    tokens: DeltaTokens, W: Tensor, grad_out: Tensor, grad_w: Tensor, learns: bool
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradients of q, k, v, beta, erase (None where k erases), log_decay (None unless it ``learns``) and of
    W before the tile, given the gradients of the outputs and of W after the tile."""
    q, k, v, beta, erase, log_decay, *_ = tokens
    blocks, reads = _cuts(tokens)
    Q, K, V, B, Y = (blocks.split(x) for x in (q, k, v, beta, grad_out))
    Q, K, E = _folded(blocks, Q, K, erase)
    E_enter, K_leave = gate(E, reads.enter), gate(K, blocks.leave)
    A, inverse = _inverse(reads, E, K, B)
    # V - E W: the values to store minus the values that the keys read before the block.
    error = torch.baddbmm(V, E_enter, W, alpha=-1)
    U = torch.bmm(inverse * B.mT, error)
    P = blocks.scores(Q, K)
    # G = R^T (P^T dO + K dW): the first term at once, the second while dW runs back through the blocks.
    G, X = torch.bmm(inverse.mT, torch.bmm(P.mT, Y)), torch.bmm(inverse.mT, K_leave)
    entering = torch.bmm(gate(Q, blocks.enter).mT, Y)
    dW, first = _read_back(blocks, G, X, entering, E_enter * B, grad_w)
    dP = blocks.hide_(torch.bmm(Y, U.mT))
    dQ = blocks.add_to_rows_(gate(torch.bmm(Y, W.mT), blocks.enter), dP, K)
    # The gradient of M = I + diag(beta) A is -R^T dU U^T = -G U^T, since U = M^-1 (..); the sign enters below.
    dA = torch.bmm(G, U.mT)
    dB = (G * error).sum(-1, keepdim=True).sub_((dA * A).sum(-1, keepdim=True))
    dV = G.mul_(B)
    dA = reads.hide_(dA, diagonal=-1).mul_(B)
    written = gate(torch.bmm(U, dW.mT), blocks.leave)
    read = gate(torch.bmm(dV, W.mT), reads.enter)
    if log_decay is None and erase is None:
        dK = written.sub_(read).baddbmm_(dP.mT, Q).baddbmm_(dA + dA.mT, K, alpha=-1)
        return [*map(blocks.join, (dQ, dK, dV, dB)), None, None], first.view(grad_w.shape)
    read = blocks.add_to_rows_(read, dA, K)
    written = blocks.add_to_columns_(blocks.add_to_columns_(written, dP, Q), -dA, E)
    dG = None
    if learns and log_decay is not None:
        wide = grad_w.dtype
        change = Q.to(wide) * dQ - K.to(wide) * written - E.to(wide) * read
        ended = _ended(blocks, W, K_leave, U).to(wide).mul_(dW).sum(-1)
        dG = blocks.decay_gradient(change, ended)
        if tokens.early:  # the decay of a token does not act on its early read
            dG = dG + blocks.join((E.to(wide) * read).sum(-1, keepdim=True))
        dG = dG if log_decay.dim() == 4 else dG.squeeze(-1)
    dQ, written, read = blocks.read(dQ), blocks.written(written), blocks.read(read)
    keys = (written - read, None) if erase is None else (written, blocks.join(read.neg_()))
    return [*map(blocks.join, (dQ, keys[0], dV, dB)), keys[1], dG], first.view(grad_w.shape)


def _cuts(tokens: DeltaTokens) -> tuple[SequenceBlocks, SequenceBlocks]:
    """Return the blocks of ``tokens``, and the same blocks with the factors of the erasing keys."""
    blocks = cut(tokens.q, tokens.reset, tokens.log_decay)
    return blocks, cut(tokens.q, tokens.reset, tokens.log_decay, early=True) if tokens.early else blocks


def _folded(blocks: SequenceBlocks, Q: Tensor, K: Tensor, erase: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and erasing keys (K, if ``erase`` is None), with the factors of a fold."""
    E = K if erase is None else blocks.split(erase)
    return blocks.read(Q), blocks.written(K), blocks.read(E)


def _ended(blocks: SequenceBlocks, W: Tensor, K: Tensor, U: Tensor) -> Tensor:
    """Return W after each block, before a fold's decay, given W before each block."""
    decayed = W if blocks.state_decay is None else W * blocks.state_decay.flatten(0, 1).to(W.dtype)
    return torch.baddbmm(decayed, K.mT, U)


def _inverse(blocks: SequenceBlocks, E: Tensor, K: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return A, the strictly lower part of E K^T, and (I + diag(beta) A)^-1, computed in float32 at least."""
    A = blocks.scores(E, K, diagonal=-1)
    # In bfloat16 the rounding errors of the substitution would grow from row to row.
    return A, unit_lower_inverse((A * B).to(accumulator_dtype(A))).to(A.dtype)


def _write(blocks: SequenceBlocks, U: Tensor, X: Tensor, K: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Run U <- U - X W, W <- W + K^T U over the blocks, U in place; return W before each block and the last W."""
    W = blocks.initial(w.flatten(0, 1))
    states = []
    for j, (u, x, k) in enumerate(zip(*(blocks.by_row(part).unbind(1) for part in (U, X, K)))):
        states.append(W.to(U.dtype))
        u.baddbmm_(x, states[-1], alpha=-1)
        decay, decay_after = _decays(blocks, j)
        W = gate(_add_product(gate(W, decay), k.mT, u), decay_after)
    return torch.stack(states, 1).flatten(0, 1), W


def _read_back(
    blocks: SequenceBlocks, G: Tensor, X: Tensor, local: Tensor, K: Tensor, grad_w: Tensor
) -> tuple[Tensor, Tensor]:
    """Run G <- G + X dW, dW <- dW + local - K^T G from the last block, G in place. Returns dW after each block (before
    a fold's decay) and dW before the first."""
    dW = grad_w.flatten(0, 1)
    states = []
    parts = zip(*(blocks.by_row(part).unbind(1) for part in (G, X, local, K)))
    for j, (g, x, added, k) in reversed(list(enumerate(parts))):
        decay, decay_after = _decays(blocks, j)
        dW = gate(dW, decay_after)
        states.append(dW.to(G.dtype))
        g.baddbmm_(x, states[-1])
        dW = _add_product(gate(dW, decay) + added, k.mT, g, alpha=-1)
    return torch.stack(states[::-1], 1).flatten(0, 1), blocks.initial(dW)


def _decays(blocks: SequenceBlocks, j: int) -> tuple[Tensor | None, Tensor | None]:
    """Return what multiplies W in block ``j``, and what multiplies W after the block's addition."""
    decay, decay_after = (None if part is None else part[:, j] for part in (blocks.state_decay, blocks.decay_after))
    return decay, decay_after


def _add_product(total: Tensor, a: Tensor, b: Tensor, alpha: int = 1) -> Tensor:
    """Return total + alpha * a b, the product in the dtype of a and b, the sum in the dtype of ``total``."""
    if total.dtype == a.dtype:
        return torch.baddbmm(total, a, b, alpha=alpha)
    return torch.add(total, torch.bmm(a, b), alpha=alpha)


TILE = 8


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 for strictly lower triangular matrices [count, size, size], size 8 times a power of two: R.

    Forward substitution inside tiles of 8 on the diagonal, all tiles along the last axis, then doubling:
    the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. Faster than a batched triangular solve, and unlike
    a product of powers free of cancellation when many keys are alike.
    """
    size = lower.shape[-1]
    inverse = torch.zeros_like(lower)
    _diagonal_tiles(inverse).copy_(_substitute(_diagonal_tiles(lower).permute(1, 2, 0, 3)).permute(2, 0, 1, 3))
    half = TILE
    while half < size:
        for start in range(0, size, 2 * half):
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
            # -B' C A'
            below = torch.bmm(inverse[:, second, second], lower[:, second, first])
            inverse[:, second, first] = torch.bmm(below, inverse[:, first, first]).neg_()
        half *= 2
    return inverse


def _diagonal_tiles(matrices: Tensor) -> Tensor:
    """View the tiles on the diagonal of [count, size, size] as [count, TILE, TILE, tiles]."""
    count, size, _ = matrices.shape
    return matrices.view(count, size // TILE, TILE, size // TILE, TILE).diagonal(dim1=1, dim2=3)


def _substitute(tiles: Tensor) -> Tensor:
    """Return the inverses of tiles [TILE, TILE, ...] by forward substitution, row by row."""
    tiles = tiles.contiguous()
    inverse = torch.zeros_like(tiles)
    inverse.diagonal().fill_(1)
    for row in range(1, TILE):
        inverse[row, :row] = (tiles[row, :row, None] * inverse[:row, :row]).sum(0).neg_()
    return inverse
