"""Attention in pieces: of or over a few tokens at once, and how softmaxes over disjoint keys become one.

A piece keeps its weights for the backward, so one of its sides must be short: memory is their product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.autocast import autocast_together
from kinformer.core.contract import state_dtype


class Piece(NamedTuple):
    """Outputs [batch, heads, queries, head_dim] and their log-sum-exp [batch, heads, queries], -inf for no keys."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Piece:
    """softmax(scale * q k^T + bias) v over the keys that are not ``hidden``.

    q [batch, heads, m, head_dim]; k, v [batch, heads, n, ...]; ``hidden`` (bool) and ``bias`` broadcast to
    [batch, heads, m, n]. A query that sees nothing gives 0. ``dropout`` of the probabilities leaves the log-sum-exp
    alone.
    """
    q, k, v = autocast_together(q, k, v)
    scores = (q * scale) @ k.mT
    weights, total, lse = _weights(scores, hidden, bias, dropout)
    return Piece((weights.to(v.dtype) @ v) / total.to(v.dtype), lse)


def attend_through(
    q: Tensor,
    x: Tensor,
    key: tuple[Tensor, Tensor | None],
    value: tuple[Tensor, Tensor | None],
    *,
    scale: float,
    hidden: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of a few queries over keys and values x W_k^T + b_k and x W_v^T + b_v that are never made.

    q [batch, heads, m, head_dim], x [batch, n, dim]; key and value a weight [heads * head_dim, dim] and a bias or None.
    The products meet x itself: q (x W_k^T)^T = (q W_k) x^T and P (x W_v^T + b) = (P x) W_v^T + b, which costs
    2 * heads * m * n * dim rather than 2 * n * dim * heads * head_dim operations each. A query that sees nothing
    gives 0.
    """
    batch, heads, m, head_dim = q.shape
    weight, bias = value
    q, x, into, weight = autocast_together(q * scale, x, key[0], weight)
    inner = torch.einsum("bhmd,hdw->bhmw", q, into.view(heads, head_dim, -1))
    scores = (inner.flatten(1, 2) @ x.mT).view(batch, heads, m, -1)
    if key[1] is not None:
        scores = scores + q @ key[1].to(q.dtype).view(heads, head_dim, 1)
    weights, total, _ = _weights(scores, hidden, None, dropout)
    mixed = (weights.to(x.dtype).flatten(1, 2) @ x).view(batch, heads, m, -1) / total.to(x.dtype)
    out = torch.einsum("bhmw,hdw->bhmd", mixed, weight.view(heads, head_dim, -1))
    if bias is None:
        return out
    share = weights.sum(-1, keepdim=True) / total
    return out + share.to(out.dtype) * bias.to(out.dtype).view(heads, 1, head_dim)


def merge(one: Piece, two: Piece) -> Piece:
    """The softmax over the keys of both, which must be disjoint."""
    top = torch.maximum(one.lse, two.lse).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    first, second = (one.lse - top).exp(), (two.lse - top).exp()
    total = first + second
    blind = total == 0
    safe = total.masked_fill(blind, 1)
    first, second = ((weight / safe)[..., None].to(one.out.dtype) for weight in (first, second))
    return Piece(one.out * first + two.out * second, (safe.log() + top).masked_fill(blind, -torch.inf))


def _weights(
    scores: Tensor, hidden: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - the row's highest) and, before dropout, their sum [..., 1] (1 for no keys) and log-sum-exp, in
    float32 or better. Whoever divides the product by the sum, not the weights, has nothing but the weights kept."""
    scores = scores.to(state_dtype(scores.dtype))
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1)
    lse = (total.log() + top).masked_fill(blind, -torch.inf).squeeze(-1)
    return functional.dropout(weights, dropout) if dropout else weights, total, lse
