"""The tokens of every run side by side, in tiles: what attention within a run computes are blocks of tiles.

Tiles of ``rows`` tokens are sorted by their depth (first, second, ... of its run), and within one depth by the length
of their runs, the longest first. So the runs that have a tile at some depth are the first ones at every depth before
it, and what the tiles of one depth see lies in slices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Of one round of a row's and head's slots, all of them flattened to [batch * heads * slots] tokens.

    ``token`` [lines] int64: whose line it is; lines that are left over at the ends of runs stand for token 0. ``line``
    [tokens] int64: where a token stands, ``lines`` if nowhere. ``spare`` [lines] bool: left over.
    ``first``, ``counts``: of each depth, its first tile and its number of tiles.
    """

    token: Tensor
    line: Tensor
    spare: Tensor
    first: list[int]
    counts: list[int]


def rows_per_tile(size: int) -> int:
    """A divisor of the chunk's ``size``: small tiles compute few pairs that nobody sees, large ones run faster."""
    if size <= 48:
        return size
    return max((rows for rows in range(16, 65) if size % rows == 0), key=lambda rows: (rows <= 32, rows), default=size)


def lay_out(runs: Tensor, ranks: Tensor, past: int, rows: int) -> Layout:
    """runs, ranks: [batch * heads, slots] int64 of one round. Runs without a token after ``past`` slots are left out,
    as nobody asks what they hold."""
    flat, number = flat_runs(runs)
    tile = ranks.flatten() // rows
    tiles = tile.new_zeros(number + 1).scatter_reduce_(0, flat, tile + 1, "amax")
    if past:
        slot = torch.arange(runs.shape[1], device=runs.device).expand_as(runs).flatten()
        last = tile.new_zeros(number + 1).scatter_reduce_(0, flat, slot, "amax")
        tiles.masked_fill_(last < past, 0)
    tiles[-1] = 0
    order = torch.argsort(tiles, descending=True, stable=True)
    column = torch.empty_like(order).scatter_(0, order, torch.arange(number + 1, device=order.device))
    depth = int(tiles[order[0]])
    counts = (tiles[:, None] > torch.arange(depth, device=tiles.device)).sum(0)
    first = counts.cumsum(0) - counts
    lines = int(counts.sum()) * rows
    inside = tile < tiles[flat]
    begin = torch.cat([first, first.new_zeros(1)])[torch.where(inside, tile, depth)]
    line = torch.where(inside, (begin + column[flat]) * rows + ranks.flatten() % rows, lines)
    token = torch.full((lines + 1,), -1, device=line.device)
    token.scatter_(0, line, torch.arange(len(line), device=line.device))
    token = token[:-1]
    return Layout(token.clamp_min(0), line, token < 0, first.tolist(), counts.tolist())


def chunk_numbers(runs: Tensor, ranks: Tensor, size: int) -> Tensor:
    """Numbers [batch * heads * slots] that differ by 0 or 1 exactly where tokens of a row and head are in one run, in
    one chunk or in chunks that follow each other."""
    flat, number = flat_runs(runs)
    chunk = ranks.flatten() // size
    chunks = chunk.new_zeros(number + 1).scatter_reduce_(0, flat, chunk + 1, "amax")
    begin = (chunks + 1).cumsum(0) - chunks
    return torch.where(flat == number, -number, begin[flat] + chunk)


def flat_runs(runs: Tensor) -> tuple[Tensor, int]:
    """Numbers of runs [batch * heads * slots] that are unlike for all rows, and how many they may be; that is also the
    number of none."""
    each = int(runs.max()) + 1
    number = each * len(runs)
    own = runs + each * torch.arange(len(runs), device=runs.device)[:, None]
    return torch.where(runs < 0, number, own).flatten(), number
