"""Exact softmax attention written densely: the truth the other implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.softmax.geometry import Problem, dropout_mask, visible


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [batch, q_heads, time, head_dim_v] and log-sum-exp [batch, q_heads, time], all pairs at once."""
    batch, heads, time, _ = q.shape
    slots = k.shape[2]
    numbers = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(numbers).repeat_interleave(heads // k.shape[1], dim=1)
    values = v.to(numbers).repeat_interleave(heads // k.shape[1], dim=1)

    seen = visible(time, range(slots), slots - time, problem.span, problem.reach, q.device)
    scores = (q.to(numbers) @ keys.mT * problem.scale).masked_fill(~seen, -torch.inf)
    sighted = seen.any(-1)
    top = scores.detach().amax(-1, keepdim=True).where(sighted[..., None], 0)
    weights = (scores - top).exp()
    total = weights.sum(-1).where(sighted, 1)
    probabilities = weights / total[..., None]
    if problem.dropout is not None:
        keep = dropout_mask(problem.dropout, batch, heads, time, slots, q.device)
        probabilities = probabilities * keep / (1 - problem.dropout.p)
    lse = (total.log() + top[..., 0]).where(sighted, -torch.inf)
    return (probabilities @ values).to(q.dtype), lse
