"""Searches by all scores q . k at once: the truth that the fast searches are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.lookup.memories import MemorySlice


def exact(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the ``topk`` best of all memories; see :func:`kinformer.kernels.lookup.look_up`."""
    return _best(_scores(q, pieces), topk)


def bucketed(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the best memory of each bucket; see :func:`kinformer.kernels.lookup.look_up`."""
    best = _scores(q, pieces).unflatten(-1, (-1, topk)).argmax(dim=-2)
    return best * topk + torch.arange(topk, device=q.device)


def _scores(q: Tensor, pieces: list[MemorySlice]) -> Tensor:
    return q @ torch.cat([piece.keys for piece in pieces], dim=2).to(q.dtype).mT


def _best(scores: Tensor, topk: int) -> Tensor:
    best, slots = scores.topk(min(topk, scores.shape[-1]), dim=-1)
    slots = torch.where(best > -torch.inf, slots, -1)
    return torch.nn.functional.pad(slots, (0, topk - slots.shape[-1]), value=-1)
