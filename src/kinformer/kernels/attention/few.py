"""Attention of few queries, or over few keys, all pairs at once: any mask, any bias, the scores of all pairs at once.

    out = P V / l,   P = exp(S - max S),   l = rowsum(P);   in the code S is ``scores``, P ``weights``, l ``total``

P is saved for the backward, so queries or keys must be few: memory is the product of their numbers.

Masks and biases of pairs and the log-sum-exps of sets have no other kernel. Two shortcuts do, and
``benchmarks/accelerators.py`` keeps them. Keys that are never made (rows ``projected`` of ``accelerators.json``): 2.2
times as fast for 16 queries as making them; delete ``attend_projected`` when that row is below 1.1. Small sets where
oneDNN makes the products (rows ``sets``): 1.8 to 10 times as fast as PyTorch's kernel; delete :data:`SETS` when they
are all below 1.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.softmax.request import Attended, Projected, Scoring, Visibility
from kinformer.kernels.softmax.scores import mixed, moved, products
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.matmul import product_dtype

SETS = 1 << 14
"""Pairs in a head up to which sets are attended here, where P fits into the caches."""


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Attend without a pattern over all keys that the masks leave; terms by distance are added pair by pair."""
    if (dtype := product_dtype(q)) != q.dtype:
        with no_autocast(q.device):
            out, lse = attend(q.to(dtype), k.to(dtype), v.to(dtype), visibility, scoring)
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
    """Attend over keys and values that are never made. The products meet x itself:

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
    """Return exp(scores - row maximum), its sum [..., 1] before dropout (1 where there is no key) and the log-sum-exp,
    in float32 or better.

    The product is divided by the sum, not the weights: the backward then keeps the weights alone.
    """
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
