"""The blocks that sequences are cut into by position, and which of them the tokens of a chunk stand in.

Block c of a sequence holds its positions c * size .. (c + 1) * size - 1. A row of slots may hold several sequences, one
after the other; its blocks are numbered through, in the order of slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.contract import Chunk


class Blocks(NamedTuple):
    """The blocks of every row, and where its queries stand among them.

    ``first`` [batch, blocks] int64: the slot of a block's first token. ``begin``, ``current``, ``offset`` [batch, time]
    int64: the number of the first block of the query's sequence, that of its current block, and its place there.
    ``aligned``: block u begins at slot u * size in every row.
    """

    first: Tensor
    begin: Tensor
    current: Tensor
    offset: Tensor
    size: int
    aligned: bool

    def complete(self, length: int) -> Tensor:
        """Return the number behind the last of the runs of ``length`` tokens, one from each block's first token on,
        that the query and earlier tokens complete, [batch, time]."""
        if length == self.size:
            return self.current + (self.offset == self.size - 1)
        tokens = (self.current - self.begin) * self.size + self.offset + 1
        return self.begin + runs(tokens, length, self.size)


def runs(tokens: Tensor, length: int, stride: int) -> Tensor:
    """Return how many runs of ``length`` tokens, one every ``stride``, a sequence of ``tokens`` tokens completes."""
    return ((tokens - length) // stride + 1).clamp_min(0)


def blocks_of(chunk: Chunk, positions: Tensor, seen: Tensor, past: int, size: int) -> Blocks:
    """Return the blocks of ``past`` slots, right-aligned, and of a chunk, whose tokens stand at ``positions``
    [batch, time] of their sequences; ``seen`` [batch] counts the tokens before the chunk."""
    slots, offset, place = past + positions.shape[1], positions % size, positions // size
    start = (past - seen)[:, None]
    index = torch.arange(slots, device=positions.device)
    if chunk.reset is None:
        first = start + size * index[: -(-slots // size)]
        return Blocks(first, torch.zeros_like(place), place, offset, size, past == 0)
    places = torch.cat([index[:past] - start, positions], 1)
    begins = (places >= 0) & (places % size == 0)
    if chunk.valid is not None:
        begins = begins & functional.pad(chunk.valid, (past, 0), value=True)
    numbers = begins.long().cumsum(1) - 1
    # While a graph is captured, or of shapes alone, every token may begin a block.
    counts = not (torch.compiler.is_compiling() or numbers.is_meta)
    count = max(int(numbers.max()) + 1, 1) if counts else slots
    at = torch.where(begins, numbers, count)
    first = torch.full_like(at[:, :1], slots).expand(-1, count + 1).scatter(1, at, index.expand_as(at))[:, :count]
    current = numbers[:, past:].clamp_min(0)
    return Blocks(first, (current - place).clamp_min(0), current, offset, size, False)


def in_blocks(x: Tensor, first: Tensor, size: int, aligned: bool = False) -> Tensor:
    """Return the slots of ``x`` [batch, heads, slots, width] block by block, [batch, heads, blocks, size, width].

    The last block of a sequence is not full; what stands there beyond the sequence has no meaning.
    """
    slots = x.shape[2]
    if aligned:
        return functional.pad(x, (0, 0, 0, first.shape[1] * size - slots)).unflatten(2, (-1, size))
    index = (first.unsqueeze(-1) + torch.arange(size, device=x.device)).clamp(0, slots - 1)
    index = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index).unflatten(2, (-1, size))
