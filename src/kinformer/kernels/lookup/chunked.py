"""Searches tile by tile: only the best scores of a tile outlive it, so a tile stays in the cache.

A bucket's best is computed by one maximum over whole numbers (see ``numbered``), which rounds scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kinformer.kernels.lookup.memories import MemorySlice, numbered

_PAIRS = 1 << 20
"""Scores in a tile."""
_FEW = 8
"""So few queries take all of their scores at once."""


def exact(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the ``topk`` memories of largest score among all seen so far, tile after tile."""
    best = q.new_full((*q.shape[:3], topk), -torch.inf)
    best_slots = torch.full_like(best, -1, dtype=torch.int64)
    rows = max(4 * topk, _PAIRS // (q.shape[0] * q.shape[1] * q.shape[2]))
    for keys, begin in _tiles([piece.keys for piece in pieces], rows):
        scores = q @ keys.to(q.dtype).mT
        new = torch.arange(begin, begin + keys.shape[2], device=q.device).expand(scores.shape)
        best, chosen = torch.cat([best, scores], dim=-1).topk(topk, dim=-1)
        best_slots = torch.cat([best_slots, new], dim=-1).gather(-1, chosen)
    return best_slots


def bucketed(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    """Return the best memory of each bucket; many queries go one head of one row at a time."""
    if q.shape[2] <= _FEW:
        rows = _few(q, pieces, topk)
    else:
        queries = q.to(torch.promote_types(q.dtype, torch.float32))
        heads = [
            _buckets(queries[row, head], [piece.keys[row, head] for piece in pieces], topk)
            for row in range(q.shape[0])
            for head in range(q.shape[1])
        ]
        rows = torch.stack(heads).view(*q.shape[:2], topk, q.shape[2]).mT
    return rows * topk + torch.arange(topk, device=q.device)


def _few(q: Tensor, pieces: list[MemorySlice], topk: int) -> Tensor:
    scores = torch.cat([q @ piece.keys.to(q.dtype).mT for piece in pieces], dim=-1)
    return scores.unflatten(-1, (-1, topk)).max(dim=-2).indices


def _buckets(q: Tensor, keys: list[Tensor], topk: int) -> Tensor:
    """Return the row [topk, time] of the best memory in each bucket, for q [time, head_dim]."""
    time, total = q.shape[0], sum(len(piece) for piece in keys) // topk
    scores = numbered(q, keys, total)
    numbers = scores.rows(torch.arange(total * topk, device=q.device), topk)
    size = topk * max(1, _PAIRS // (time * topk))
    tile = torch.empty(size, time, dtype=scores.whole, device=q.device)
    best = torch.zeros(topk, time, dtype=scores.whole, device=q.device)
    for some, begin in _tiles(keys, size):
        part = tile[: len(some)]
        scores.write(part, scores.rounded(some), slice(None), numbers[begin : begin + len(some)])
        torch.maximum(best, part.view(-1, topk, time).amax(dim=0), out=best)
    return scores.row_of(best)


def _tiles(keys: list[Tensor], rows: int) -> Iterator[tuple[Tensor, int]]:
    """Yield keys [..., memories, head_dim] of at most ``rows`` memories at a time, and the number of the first."""
    begin = 0
    for piece in keys:
        for first in range(0, piece.shape[-2], rows):
            yield piece[..., first : first + rows, :], begin + first
        begin += piece.shape[-2]
