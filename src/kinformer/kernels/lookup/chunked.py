"""Searches tile by tile: of the scores of a tile, which stays in the cache, only the best are kept.

A bucket's best is found by one maximum over integers: scores are made positive floats, whose bits order as integers do,
and the last bits of each give way to the number of its row. So scores that differ in these bits alone count as equal:
in float32 by 2^-12 with 2048 rows (65,536 memories in 32 buckets), in float64 by nothing to speak of. The products are
bfloat16 where there are many, of float32, and that is fast: they choose, but what is chosen is scored anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kinformer.kernels.lookup.lists import POSITIVE, narrow
from kinformer.kernels.lookup.pieces import Piece

_PAIRS = 1 << 19
"""Scores in a tile."""
_FEW = 8
"""So few queries take all of their scores at once."""


def exact(q: Tensor, pieces: list[Piece], topk: int) -> Tensor:
    """The ``topk`` of largest score among all that were seen so far, tile after tile."""
    best = q.new_full((*q.shape[:3], topk), -torch.inf)
    found = torch.full_like(best, -1, dtype=torch.int64)
    rows = max(4 * topk, _PAIRS // (q.shape[0] * q.shape[1] * q.shape[2]))
    for keys, begin in _tiles([piece.keys for piece in pieces], rows):
        scores = q @ keys.to(q.dtype).mT
        new = torch.arange(begin, begin + keys.shape[2], device=q.device).expand(scores.shape)
        best, chosen = torch.cat([best, scores], dim=-1).topk(topk, dim=-1)
        found = torch.cat([found, new], dim=-1).gather(-1, chosen)
    return found


def bucketed(q: Tensor, pieces: list[Piece], topk: int) -> Tensor:
    """The best of each bucket; of many queries one head of one row after the other."""
    if q.shape[2] <= _FEW:
        rows = _few(q, pieces, topk)
    else:
        queries = q.to(torch.promote_types(q.dtype, torch.float32)).mT.contiguous()
        heads = [
            _buckets(queries[row, head], [piece.keys[row, head] for piece in pieces], topk)
            for row in range(q.shape[0])
            for head in range(q.shape[1])
        ]
        rows = torch.stack(heads).view(*q.shape[:2], topk, q.shape[2]).mT
    return rows * topk + torch.arange(topk, device=q.device)


def _few(q: Tensor, pieces: list[Piece], topk: int) -> Tensor:
    scores = torch.cat([q @ piece.keys.to(q.dtype).mT for piece in pieces], dim=-1)
    return scores.unflatten(-1, (-1, topk)).max(dim=-2).indices


def _buckets(q: Tensor, keys: list[Tensor], topk: int) -> Tensor:
    """Rows of ``topk`` memories: the row [topk, time] of the best in each bucket, for q [head_dim, time]."""
    time, total = q.shape[1], sum(len(piece) for piece in keys) // topk
    whole = torch.int32 if q.dtype == torch.float32 else torch.int64
    rows = max(1, _PAIRS // (time * topk))
    last = (1 << total.bit_length()) - 1
    numbers = torch.arange(total, dtype=whole, device=q.device)[:, None, None]
    dtypes = (narrow(q, total * topk), q.dtype)
    products, tile = (q.new_empty(rows * topk, time, dtype=dtype) for dtype in dtypes)
    best = torch.zeros(topk, time, dtype=whole, device=q.device)
    q = q.to(dtypes[0])
    for some, begin in _tiles(keys, rows * topk):
        scores = torch.mm(some.to(q.dtype), q, out=products[: len(some)])
        bits = tile[: len(some)].copy_(scores).add_(POSITIVE).view(whole).view(-1, topk, time)
        numbered = bits.bitwise_and_(~last).bitwise_or_(numbers[begin // topk : begin // topk + len(bits)])
        torch.maximum(best, numbered.amax(dim=0), out=best)
    return (best & last).long()


def _tiles(keys: list[Tensor], rows: int) -> Iterator[tuple[Tensor, int]]:
    """Keys [..., memories, head_dim] of at most ``rows`` memories at a time, and the number of the first."""
    begin = 0
    for piece in keys:
        for first in range(0, piece.shape[-2], rows):
            yield piece[..., first : first + rows, :], begin + first
        begin += piece.shape[-2]
