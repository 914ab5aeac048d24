"""Softmax attention whose keys pass through a Householder-like matrix for every later token (PaTH attention).

    H_s = I - beta_s w_s w_s^T,        score_ij = q_i^T H_i H_(i-1) ... H_(j+1) k_j

(Yang et al. 2025, arXiv 2505.16381, section 3.1). :func:`reference` multiplies every earlier key by H_i for every token
i: k_j <- H_i k_j. :func:`householder_attention` takes blocks of tokens. The product of a block
has a WY form (section 3.3): with W, K, Q and beta of a block, the keys N before it, and

    T = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta),    G = tril(Q W^T) T,    M = tril(W K^T, -1)

    scores with N: (Q - G W) N^T      with K: tril(Q K^T) - G M
    keys after the block: N (I - W^T T^T W),  K - M^T T^T W

so that keys before the block cost three products with N, where plain attention has two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kinformer.core.contract import state_dtype

BLOCK = 64


class Tokens(NamedTuple):
    """A chunk: q [batch, heads, time, width], k and w [batch, kv_heads, time, width], beta [batch, kv_heads, time],
    0 where a token is padding, and ``positions`` [batch, time] in their sequences."""

    q: Tensor
    k: Tensor
    w: Tensor
    beta: Tensor
    positions: Tensor


def reference(tokens: Tokens, past: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, heads, time, value width] and the keys after the chunk [batch, kv_heads, past + time,
    width].

    past: the keys before the chunk [batch, kv_heads, past, width]; v [batch, kv_heads, past + time, value width];
    sums [batch, heads, past + time, 1]: the summed logarithms of forget gates, or None.
    """
    keys, outputs = past, []
    group = tokens.q.shape[1] // past.shape[1]
    for t in range(tokens.q.shape[2]):
        w, beta = tokens.w[:, :, t : t + 1], tokens.beta[:, :, t, None, None]
        keys = torch.cat([keys - beta * (keys @ w.mT) @ w, tokens.k[:, :, t : t + 1]], dim=2)
        scores = tokens.q[:, :, t : t + 1] @ keys.repeat_interleave(group, 1).mT
        place = past.shape[2] + t
        if sums is not None:
            scores = scores + (sums[:, :, place : place + 1] - sums[:, :, : place + 1].mT).to(scores.dtype)
        distance = place - torch.arange(place + 1, device=scores.device)
        visible = distance <= tokens.positions[:, t, None]
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        outputs.append(weights @ v[:, :, : place + 1].repeat_interleave(group, 1))
    return torch.cat(outputs, dim=2), keys


def householder_attention(tokens: Tokens, past: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`reference`, computed ``BLOCK`` tokens at a time.

    Scores and keys are float32 at least. The backward pass computes the scores of a block again, so that memory
    holds the keys before every block but no scores.
    """
    time, outputs = tokens.q.shape[2], []
    keys = past.to(state_dtype(past.dtype))
    recompute = torch.is_grad_enabled() and time > BLOCK
    for start in range(0, time, BLOCK):
        stop = min(start + BLOCK, time)
        part = Tokens(*(leaf[:, :, start:stop] for leaf in tokens[:-1]), tokens.positions[:, start:stop])
        end = past.shape[2] + stop
        arguments = part, keys, v[:, :, :end], None if sums is None else sums[:, :, :end]
        y, keys = checkpoint(_block, *arguments, use_reentrant=False) if recompute else _block(*arguments)
        outputs.append(y)
    return torch.cat(outputs, dim=2), keys


def _block(tokens: Tokens, keys: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of one block, and the keys up to its end in the dtype of ``keys``."""
    dtype = keys.dtype
    q, k, w, beta = (leaf.to(dtype) for leaf in tokens[:-1])
    before, time, width = keys.shape[2], *k.shape[2:]
    q = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, time, width]
    beta = beta.unsqueeze(-1)
    identity = torch.eye(max(time, width), dtype=dtype, device=k.device)
    system = identity[:time, :time] + beta * (w @ w.mT).tril(-1)
    t = torch.linalg.solve_triangular(system, beta * identity[:time, :time], upper=False, unitriangular=True)
    g = (q @ w.mT.unsqueeze(2)).tril() @ t.unsqueeze(2)
    m, tw = (w @ k.mT).tril(-1), t.mT @ w

    scores = q @ k.mT.unsqueeze(2) - g @ m.unsqueeze(2)
    if before:
        scores = torch.cat([(q - g @ w.unsqueeze(2)) @ keys.mT.unsqueeze(2), scores], dim=-1)
    if sums is not None:
        fading = sums[:, :, before:] - sums.mT  # in float64: sums grow with the text, their differences do not
        scores = scores + fading.to(dtype).unflatten(1, (k.shape[1], -1))
    place = torch.arange(before + time, device=k.device)
    distance = place[before:, None] - place
    visible = (distance >= 0) & (distance <= tokens.positions[..., None])
    weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    y = weights.to(v.dtype) @ v.unsqueeze(2)
    if 2 * time < width:
        keys = keys - (keys @ w.mT) @ tw
    else:
        keys = keys @ (identity[:width, :width] - w.mT @ tw)
    return y.flatten(1, 2), torch.cat([keys, k - m.mT @ tw], dim=2)
