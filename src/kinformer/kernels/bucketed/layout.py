"""The layout of bucketed attention: the tokens of every run side by side, in tiles that blocks compute together.

By depth (``_by_depth``), tiles of ``rows`` tokens are sorted by their depth (first, second, ... of its run), and within
one depth by the length of their runs, the longest first. So the runs that have a tile at some depth are the first ones
at every depth before it, and what the tiles of one depth see lies in slices: no product is wasted. Where a few
runs are long, as they are before hashes have learnt to tell tokens apart, depths are many and have few tiles; then runs
lie one after the other (``by_run``), a tile's keys lie in the tiles before it, and those of another run are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.kernels.tiling import tile_size

PAIRS = 1 << 18
"""In a block: few enough to stay in a cache."""
SHORT = 2
"""So many times the blocks, none of which is masked, are as fast as one of all tiles."""


class Block(NamedTuple):
    """Some tiles of queries and the tiles of keys that they see, as slices of tiles; the last slice is their own."""

    queries: slice
    keys: list[slice]


class Layout(NamedTuple):
    """The layout of one round's slots, all rows and heads flattened to [batch * heads * slots] tokens.

    ``token`` [lines] int64: whose line it is; lines that are left over at the ends of runs stand for token 0. ``line``
    [tokens] int64: the line of a token, or the number of lines if it has none. ``spare`` [lines] bool: left over.
    ``hidden`` [tiles of keys of a block, tiles] bool or None: which of them a tile of queries does not see.
    """

    token: Tensor
    line: Tensor
    spare: Tensor
    blocks: list[Block]
    hidden: Tensor | None


def rows_per_tile(size: int) -> int:
    """Return a divisor of the chunk's ``size``: small tiles compute few pairs
    that nobody sees, large ones run faster."""
    if size <= 48:
        return size
    return max((rows for rows in range(16, 65) if size % rows == 0), key=lambda rows: (rows <= 32, rows), default=size)


def lay_out(runs: Tensor, ranks: Tensor, past: int, size: int) -> Layout:
    """Lay out the tokens of one round by run and rank.

    runs, ranks: [batch * heads, slots] int64; ``size``: tokens of a chunk. Runs without a token after ``past`` slots
    are left out, as no query sees them.
    """
    rows, (flat, number) = rows_per_tile(size), flat_runs(runs)
    tile = ranks.flatten() // rows
    tiles = tile.new_zeros(number + 1).scatter_reduce_(0, flat, tile + 1, "amax")
    if past:
        slot = torch.arange(runs.shape[1], device=runs.device).expand_as(runs).flatten()
        last = tile.new_zeros(number + 1).scatter_reduce_(0, flat, slot, "amax")
        tiles.masked_fill_(last < past, 0)
    tiles[-1] = 0
    depth, total = int(tiles.max()), int(tiles.sum())
    inside = tile < tiles[flat]
    # Blocks by depth are at least ``depth``; blocks by run follow the pairs. Take the order with clearly fewer.
    many = depth > SHORT * (1 + total * rows**2 * 2 * (size // rows) // PAIRS)
    place, whole, blocks, hidden = (_by_run if many else _by_depth)(tiles, depth, size // rows, rows)
    at = place(torch.where(inside, flat, number), torch.where(inside, tile, 0))
    line = torch.where(inside, at * rows + ranks.flatten() % rows, whole * rows)
    token = torch.full((whole * rows + 1,), -1, device=line.device)
    token.scatter_(0, line, torch.arange(len(line), device=line.device))
    token = token[:-1]
    return Layout(token.clamp_min(0), line, token < 0, blocks, hidden)


_Order = tuple[Callable[[Tensor, Tensor], Tensor], int, list[Block], Tensor | None]
"""Where the tiles of runs stand, how many tiles there are, their blocks, and what of these is hidden."""


def _by_depth(tiles: Tensor, depth: int, per_chunk: int, rows: int) -> _Order:
    """Lay tiles out by depth, ``tiles`` [runs] being the number of tiles of each run, ``depth`` at most."""
    order = torch.argsort(tiles, descending=True, stable=True)
    column = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = (tiles[:, None] > torch.arange(depth, device=tiles.device)).sum(0)
    first = counts.cumsum(0) - counts
    begins = first if depth else tiles.new_zeros(1)
    blocks = list(_blocks_of_depths(first.tolist(), counts.tolist(), per_chunk, rows, tile_size(PAIRS, tiles.device)))
    return lambda run, tile: begins[tile] + column[run], int(counts.sum()), blocks, None


def _blocks_of_depths(first: list[int], counts: list[int], per_chunk: int, rows: int, pairs: int) -> Iterator[Block]:
    for depth, tiles in enumerate(counts):
        lowest = max(0, depth // per_chunk - 1) * per_chunk
        for begin, end in _pieces(0, tiles, pairs // (rows**2 * (depth - lowest + 1))):
            keys = [slice(first[index] + begin, first[index] + end) for index in range(lowest, depth + 1)]
            yield Block(keys[-1], keys)


def _pieces(begin: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the beginnings and ends of pieces of ``limit`` at most, whose sizes are powers of two.

    Libraries compile a product for every shape and keep it: oneDNN a thousand of them, of 0.65 MB each.
    """
    while begin < end:
        size = 1 << min(end - begin, max(1, limit)).bit_length() - 1
        yield begin, begin + size
        begin += size


def _by_run(tiles: Tensor, depth: int, per_chunk: int, rows: int) -> _Order:
    """Lay tiles out run by run; before the first run stand as many empty tiles as a tile looks back."""
    back = 2 * per_chunk - 1
    begins = tiles.cumsum(0) - tiles + back
    whole = back + int(tiles.sum())
    depths = torch.arange(back, whole, device=tiles.device) - begins.repeat_interleave(tiles)
    reach = torch.minimum(depths, per_chunk + depths % per_chunk)
    offsets = torch.arange(back, -1, -1, device=tiles.device)
    hidden = torch.cat([tiles.new_zeros(back), reach]) < offsets[:, None]
    blocks = [
        Block(slice(begin, end), [slice(begin - index, end - index) for index in range(back, -1, -1)])
        for begin, end in _pieces(back, whole, tile_size(PAIRS, tiles.device) // (rows**2 * (back + 1)))
    ]
    return lambda run, tile: begins[run] + tile, whole, blocks, hidden


def chunk_numbers(runs: Tensor, ranks: Tensor, size: int) -> Tensor:
    """Return numbers [batch * heads * slots] that differ by 0 or 1 exactly where tokens of a row and head are in one
    run and in one chunk, or in chunks that follow each other."""
    flat, number = flat_runs(runs)
    chunk = ranks.flatten() // size
    chunks = chunk.new_zeros(number + 1).scatter_reduce_(0, flat, chunk + 1, "amax")
    # A number is left free between runs, so that the last chunk of one and the first of the next differ by 2.
    begin = (chunks + 1).cumsum(0) - chunks
    return torch.where(flat == number, -number, begin[flat] + chunk)


def flat_runs(runs: Tensor) -> tuple[Tensor, int]:
    """Return run numbers [batch * heads * slots] that differ between rows, and the
    number of runs, which also marks "no run"."""
    run_count = int(runs.max()) + 1
    number = run_count * len(runs)
    flat = runs + run_count * torch.arange(len(runs), device=runs.device)[:, None]
    return torch.where(runs < 0, number, flat).flatten(), number


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens ``index`` [batch, heads, ...] of ``x`` [batch, heads, time,
    width], as [batch, heads, ..., width]."""
    picked = x.gather(2, index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
    return picked.unflatten(2, index.shape[2:])
