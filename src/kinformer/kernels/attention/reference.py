"""Softmax attention written densely: the truth that every kernel is held to, in any dtype.

score_ij = scale * (q_i . k_j + (q_i + shift) . keys[d]) + bias[d] + bias_ij + c_i - c_j
d = slot of query i - slot of key j,   c = ``decay``
p_i = softmax_j(score_ij) over the keys that query i may see,   out_i = sum_j p_ij (v_j + values[d])

A sink logit z adds exp(z) to the sum below p_i. Where query i may see no key, or a bias of -inf hides all that it may
see, out_i is 0 and its log-sum-exp -inf, or z.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Relative
from kinformer.kernels.softmax import EPS, Attended, Scoring, Visibility, complex_queries, query_positions, relative_at


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v] and log-sum-exps [batch,
    q_heads, time], by all pairs at once."""
    probabilities, lse, values = _probabilities(q, k, v, visibility, scoring)
    if scoring.dropout is not None:
        retained = scoring.dropout.retained_mask(probabilities.shape, q.device)
        probabilities = probabilities * retained / (1 - scoring.dropout.p)
    out = probabilities @ values
    if scoring.relative is not None and scoring.relative.values is not None:
        moved = _by_pair(scoring.relative.values, scoring.relative.lowest, visibility, q, k)
        out = out + torch.einsum("bhij,bhijd->bhid", probabilities, moved.to(out.dtype))
    return Attended(out.to(q.dtype), lse)


@torch.no_grad()
def slot_sums(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Tensor:
    """Return the probability of each slot, summed over all queries, [batch, q_heads, slots]."""
    return _probabilities(q, k, v, visibility, scoring)[0].sum(2)


def _probabilities(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p [batch, q_heads, time, slots] before dropout, the log-sum-exps, and the values of every query head."""
    heads, accumulator = q.shape[1], state_dtype(q.dtype)
    keys, values = (x.to(accumulator).repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    query = q.to(accumulator)
    scores = _scores(query, keys, visibility, scoring)
    seen = visible(visibility, scores)
    # score_ij = -inf where query i may not see key j, so that p_ij = exp(-inf) / l = 0.
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    sink = None if scoring.sink is None else scoring.sink.to(accumulator)[:, None, None]
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    sees_any = (top != -torch.inf)[..., 0]
    top = top.where(sees_any[..., None], 0)
    weights = (scores - top).exp()
    total = weights.sum(-1).where(sees_any, 1)
    if sink is not None:
        total = total + (sink - top).exp()[..., 0]
    lse = (total.log() + top[..., 0]).where(sees_any, -torch.inf)
    return weights / total[..., None], lse, values


def visible(visibility: Visibility, scores: Tensor) -> Tensor:
    """Return a bool tensor of the shape of ``scores`` [batch, heads, time, slots]: may the query see the key?"""
    _, heads, time, slots = scores.shape
    seen = torch.ones_like(scores, dtype=torch.bool)
    if visibility.pattern is not None:
        q = query_positions(visibility, scores, slots)[:, :, None]
        k = q - _distance(time, slots, scores.device)
        pattern = visibility.pattern
        rows = [pattern.at(head).allowed(q, k) & (k >= 0) for head in range(pattern.num_heads or 1)]
        seen = torch.stack(rows, 1).expand(-1, heads, -1, -1)
    if visibility.key_padding_mask is not None:
        seen = seen & ~visibility.key_padding_mask[:, None, None]
    return seen if visibility.attn_mask is None else seen & visibility.attn_mask


def _distance(time: int, slots: int, device: torch.device) -> Tensor:
    """Return query slot - key slot, [time, slots], the last query at the last slot."""
    query = slots - time + torch.arange(time, device=device)
    return query[:, None] - torch.arange(slots, device=device)


def _by_pair(table: Tensor, lowest: int, visibility: Visibility, q: Tensor, k: Tensor) -> Tensor:
    """Return the entry of ``table`` [heads or 1, n, ...] at every pair's distance, [batch, heads, time, slots, ...]."""
    (batch, heads, time, _), slots = q.shape, k.shape[2]
    by_key = visibility.key_positions is not None
    distance = visibility.distance() if by_key else _distance(time, slots, q.device)[None]
    bias = relative_at(table, distance, lowest).transpose(0, 1)
    return bias.expand(batch, heads, *bias.shape[2:])


def _scores(q: Tensor, k: Tensor, visibility: Visibility, scoring: Scoring) -> Tensor:
    """Return the scores of all pairs, [batch, heads, time, slots]."""
    scale, relative = scoring.scale, scoring.relative or Relative(0)
    by_pair = partial(_by_pair, lowest=relative.lowest, visibility=visibility, q=q, k=k)
    if scoring.form == "modulus":
        # |q k| of complex numbers: the root of the squared real and imaginary part of the product.
        real, imaginary = (part @ k.mT for part in complex_queries(q))
        scores = scale * (real.square() + imaginary.square() + EPS).sqrt()
    elif scoring.form == "additive":
        assert scoring.vector is not None
        vector = scoring.vector.to(q.dtype)[:, None, None]
        scores = scale * ((q[..., :, None, :] + k[..., None, :, :]).tanh() * vector).sum(-1)
    elif scoring.form == "capped":
        scores = scale * (q @ k.mT).tanh()
    else:
        scores = scale * (q @ k.mT)
    if relative.factor is not None:
        scores = scores.relu() * by_pair(relative.factor.to(q.dtype))
    if relative.keys is not None:
        shifted = q if relative.shift is None else q + relative.shift.to(q.dtype)
        scores = scores + scale * torch.einsum("bhid,bhijd->bhij", shifted, by_pair(relative.keys.to(q.dtype)))
    if relative.bias is not None:
        scores = scores + by_pair(relative.bias.to(q.dtype))
    if scoring.decay is not None:
        c = scoring.decay
        scores = scores + (c[:, :, -q.shape[2] :, None] - c[:, :, None]).to(q.dtype)
    return scores if scoring.bias is None else scores + scoring.bias.to(q.dtype)
