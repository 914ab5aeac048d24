"""Searches by all scores q . k at once: the truth that the fast searches are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.lookup.lists import CoarseQuantizer, InvertedFile, MemorySlice, probed


def exact(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the ``topk`` best of all memories; see :func:`kinformer.kernels.lookup.look_up`."""
    return _best(_scores(q, pieces), topk)


def bucketed(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the best memory of each bucket; see :func:`kinformer.kernels.lookup.look_up`."""
    best = _scores(q, pieces).unflatten(-1, (-1, topk)).argmax(dim=-2)
    return best * topk + torch.arange(topk, device=q.device)


def find(q: Tensor, filed: InvertedFile, lists: CoarseQuantizer, share: int) -> Tensor:
    """Return the best memories of the probed lists; see :func:`kinformer.kernels.lookup.lists.find`."""
    scores = q @ filed.k.to(q.dtype).mT
    assigned, position = filed.assignments[:, :, None].unbind(-1)
    slots = torch.arange(assigned.shape[-1], device=q.device)
    begins = (assigned[..., None, :] < assigned[..., None]).sum(-1)
    bucket = (slots - begins) % share
    parts = []
    for chosen in probed(q, lists).unbind(-1):
        for number in range(share):
            seen = (assigned == chosen[..., None]) & (bucket == number) & (position >= filed.first)
            best, slot = scores.masked_fill(~seen, -torch.inf).max(dim=-1)
            parts.append(torch.where(best > -torch.inf, slot, -1))
    return torch.stack(parts, dim=-1)


def _scores(q: Tensor, pieces: list[MemorySlice]) -> Tensor:
    return q @ torch.cat([piece.keys for piece in pieces], dim=2).to(q.dtype).mT


def _best(scores: Tensor, topk: int) -> Tensor:
    best, slots = scores.topk(min(topk, scores.shape[-1]), dim=-1)
    slots = torch.where(best > -torch.inf, slots, -1)
    return torch.nn.functional.pad(slots, (0, topk - slots.shape[-1]), value=-1)
