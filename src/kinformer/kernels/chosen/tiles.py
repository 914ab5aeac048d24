"""The tiles of chosen blocks: the queries that chose a block side by side, some rows of them a tile.

A *line* is a place of a query in a tile; a query has one line for every block that it sees. All are numbered through
rows of queries, r = batch * choosers, and blocks u.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """The lines of some queries and their blocks.

    ``query`` [tiles * rows] int64: which query stands in a line, of r * time + t; ``spare`` [tiles * rows] bool: none,
    though ``query`` names one. ``block`` [tiles] int64: r * blocks + u. ``lines`` [r, time, count] int64: the line of
    each query and choice; ``tiles * rows``, a line beside the tiles, where there is no choice.
    """

    query: Tensor
    spare: Tensor
    block: Tensor
    lines: Tensor
    rows: int


def tiles_of(chosen: Tensor, blocks: int, rows: int) -> Tiles:
    """Lay out queries with the blocks ``chosen`` [r, time, count] int64 of each, -1 for none, in tiles of ``rows``."""
    r, time, count = chosen.shape
    device = chosen.device
    # One more block takes what is not chosen.
    hit = torch.zeros(r, blocks + 1, time, dtype=torch.bool, device=device)
    at = torch.where(chosen < 0, blocks, chosen).mT
    hit.scatter_(1, at, torch.ones((), dtype=torch.bool, device=device).expand_as(at))
    hit = hit[:, :blocks]
    counts = hit.sum(2).flatten()
    tiles = (counts + (rows - 1)) // rows
    block = torch.arange(r * blocks, device=device).repeat_interleave(tiles)
    pairs = hit.flatten().nonzero()[:, 0]
    # The line of a pair: that of the first pair of its block, and its rank there.
    begin = (tiles.cumsum(0) - tiles) * rows - (counts.cumsum(0) - counts)
    of = pairs // time
    line = begin[of] + torch.arange(len(pairs), device=device)
    total = len(block) * rows
    query = torch.zeros(total, dtype=torch.int64, device=device)
    query[line] = of // blocks * time + pairs % time
    spare = torch.ones(total, dtype=torch.bool, device=device)
    spare[line] = False
    table = torch.empty(r * (blocks + 1) * time, dtype=torch.int64, device=device)
    table[pairs + of // blocks * time] = line
    table = table.view(r, blocks + 1, time)
    table[:, blocks] = total
    return Tiles(query, spare, block, table.gather(1, at).mT.contiguous(), rows)
