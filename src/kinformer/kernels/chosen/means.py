"""The means of the keys (and values) of complete blocks: of a chunk, and of a past whose means the state holds.

A mean is made once, of the keys that the cache holds when its block is complete; the state holds those of complete
blocks, right-aligned. So the means, and their gradients, are the same however a sequence is cut. Any other summary of a
block may stand for its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, advance, state_dtype
from kinformer.kernels.chosen.blocks import Blocks, in_blocks, runs
from kinformer.runtime.host import has_data


class Means(NamedTuple):
    """``table`` [batch, heads, blocks, width] for the queries of a chunk: the mean of block number ``shift`` + j of a
    row at j, with ``shift`` [batch, 1] int64 or None for 0; ``after``: those that the state holds then."""

    table: Tensor
    shift: Tensor | None
    after: Tensor


Summarise = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Makes one vector [batch, heads, blocks, widths] of every block of ``xs`` [batch, heads, blocks, size, width], side by
side, whose first tokens stand at the positions [batch or 1, blocks]."""


class Place(NamedTuple):
    """Where a chunk's tokens stand: ``positions`` [batch, time], after ``seen`` [batch] tokens of their sequences."""

    positions: Tensor
    seen: Tensor


def averages(xs: Sequence[Tensor], begins: Tensor) -> Tensor:
    """Return the means of ``xs`` by block, one behind the other (a ``Summarise``)."""
    return torch.cat([x.mean(3, dtype=state_dtype(x.dtype)).to(x.dtype) for x in xs], -1)


def means_of(
    xs: Sequence[Tensor],
    old: Tensor,
    blocks: Blocks,
    chunk: Chunk,
    place: Place,
    summarise: Summarise = averages,
    length: int | None = None,
) -> Means:
    """Return the means (or what ``summarise`` makes) of ``xs`` [batch, heads, slots, width] by block, or of the
    ``length`` tokens from each block's first one on, after those that a state holds, ``old``."""
    positions, seen = place
    x, size = xs[0], blocks.size
    length = length or size
    slots, time = x.shape[2], positions.shape[1]
    count = max(0, (slots - length) // size + 1)
    complete, before = (runs(tokens, length, size) for tokens in (advance(seen, chunk, positions), seen))
    if chunk.reset is not None:
        past = (torch.arange(slots - time, device=x.device) - (slots - time)) + seen[:, None]
        begins = torch.cat([past, positions], 1).gather(1, blocks.first.clamp_max(slots - 1))
        table = summarise([in_blocks(x, blocks.first, length) for x in xs], begins)
        number, before = torch.arange(table.shape[2], device=x.device).expand(len(x), -1), before[:, None]
        slot = torch.where(number < before, old.shape[2] - before + number, -1)
        table = torch.where((slot < 0)[:, None, :, None], table, _picked(old.to(x.dtype), slot))
        return Means(table, None, _picked(table, _places(complete, count, blocks, chunk)))
    if slots == time:
        begins = size * torch.arange(count, device=x.device)[None]
        table = summarise([_side_by_side(x, count, length, size) for x in xs], begins)
        after = table if chunk.valid is None else _picked(table, _places(complete, count, None, chunk))
        return Means(table, None, after)
    # A recording of a step ends at this look, before slots of another past than the means' confuse what follows.
    if not _any(complete > before) and old.shape[2] == count:
        return Means(old.to(x.dtype), complete[:, None] - count, old)
    # A chunk completes at most this many blocks; the others are in ``old``.
    new = min(time // size + 1, count)
    number = complete[:, None] + torch.arange(-new, 0, device=x.device)
    fresh = summarise([in_blocks(x, blocks.first[:, :1] + size * number, length) for x in xs], size * number)
    number, before = _places(complete, count, None, chunk), before[:, None]
    slot = torch.where(number < before, old.shape[2] - before + number, old.shape[2] + new - complete[:, None] + number)
    after = _picked(torch.cat([old.to(x.dtype), fresh], 2), torch.where(number < 0, -1, slot))
    return Means(after, complete[:, None] - count, after)


def _side_by_side(x: Tensor, count: int, length: int, stride: int) -> Tensor:
    """Return ``count`` runs of ``length`` slots of ``x`` [batch, heads, slots, width], one every ``stride``."""
    if length == stride:
        return x[:, :, : count * length].unflatten(2, (count, length))
    return x.unfold(2, length, stride).mT if count else x.new_zeros(*x.shape[:2], 0, length, x.shape[3])


def _any(flags: Tensor) -> bool:
    """Return whether some of ``flags`` are set, and True where the host cannot know."""
    return torch.compiler.is_compiling() or not has_data(flags) or bool(flags.any())


def _places(complete: Tensor, count: int, blocks: Blocks | None, chunk: Chunk) -> Tensor:
    """Return the blocks of the last ``count`` means of every row, [batch, count] int64, negative for none; ``blocks``:
    the numbers are those of rows of several sequences, of which the last one counts."""
    number = complete[:, None] + torch.arange(-count, 0, device=complete.device)
    if blocks is None:
        return number
    last = blocks.begin[:, -1:]
    if chunk.valid is not None:
        last = blocks.begin.gather(1, (chunk.valid.sum(1, keepdim=True) - 1).clamp_min(0))
    return torch.where(number < 0, -1, number + last)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x`` [batch, heads, n, width] at ``index`` [batch, m] int64, 0 where that is negative."""
    if not x.shape[2]:
        return x.new_zeros(*x.shape[:2], index.shape[1], x.shape[3])
    picked = x.gather(2, index.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.where((index < 0)[:, None, :, None], picked.new_zeros(()), picked)
