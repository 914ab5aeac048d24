"""Tokens that are picked by their slots, and the pairs that a pattern allows of picked queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.pattern import Pattern


def index_of(slots: Tensor, x: Tensor) -> Tensor:
    """Return ``slots`` as an index into ``x`` [batch, time, ...]; empty slots point anywhere in it."""
    return slots.clamp(0, x.shape[1] - 1)


def at_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Return x [batch, heads, time, head_dim] at ``slots`` [batch, n]."""
    index = slots.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def allowed_pairs(pattern: Pattern, q: Tensor, k: Tensor) -> Tensor:
    """Return which pairs the pattern allows, [batch, heads or 1, queries, keys]."""
    return torch.stack([pattern.at(head).allowed(q, k) for head in range(pattern.num_heads or 1)], 1)
