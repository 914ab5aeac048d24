"""Attention within buckets pair by pair: every condition of the definition over all pairs, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.bucketed.membership import Membership
from kinformer.kernels.softmax import Attended


def visible(membership: Membership, time: int, itself: bool) -> Tensor:
    """Return whether a query sees a key in some round, bool [batch, heads, time, slots]."""
    runs, ranks, size = membership.runs, membership.ranks, membership.size
    slots = runs.shape[3]
    queries, rank = (item[..., slots - time :, None] for item in (runs, ranks))
    runs, ranks = runs[..., None, :], ranks[..., None, :]
    earlier = ranks <= rank if itself else ranks < rank
    # The key is in the chunk of the query or in the chunk before.
    near = ranks // size >= rank // size - 1
    return ((queries == runs) & (runs >= 0) & earlier & near).any(2)


def dense(q: Tensor, k: Tensor, v: Tensor, membership: Membership, scale: float, itself: bool) -> Attended:
    """Attend over all pairs; arguments and result as for ``bucketed_attention``."""
    wide = state_dtype(q.dtype)
    seen = visible(membership, q.shape[2], itself)
    scores = (q.to(wide) @ k.to(wide).mT * scale).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    lse = scores.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    return Attended((weights @ v.to(wide)).to(v.dtype), lse)
