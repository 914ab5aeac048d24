"""The rule by which blocks are chosen, given how important each is for a query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_ROUNDED = 6
"""Last bits of a float32 that rounding may move: importances that differ there alone are equal."""
_NONE = -(1 << 62)


class Choosing(NamedTuple):
    """How blocks are chosen: each of the ``choosers`` (query heads, or groups of them side by side) takes ``most``
    blocks beside the current one, among them the ``first`` of the sequence and the ``near`` ones before it."""

    choosers: int
    most: int
    first: int
    near: int


class Numbers(NamedTuple):
    """The numbers of blocks, [batch, time] int64 each, as the means of a row are numbered: the first block of the
    query's sequence, its current block, and the one behind the last complete one, its own token included."""

    begin: Tensor
    current: Tensor
    complete: Tensor


class Cover(NamedTuple):
    """How the blocks that may be chosen lie over summaries that overlap: one begins every *unit*, ``units`` of which
    make a block, and covers ``span`` of them.

    ``first`` [batch, blocks] int64: the place in the table of summaries of the one that begins where a block does;
    ``begin``, ``current`` [batch, time] int64: the first block of the query's sequence and its current one, as blocks
    of a row are numbered.
    """

    first: Tensor
    begin: Tensor
    current: Tensor
    units: int
    span: int

    def importance(self, probabilities: Tensor) -> Tensor:
        """Return the importance of the blocks [batch, choosers, time, blocks] by that of the summaries, each added once
        for every unit that it shares with a block (Yuan et al. 2025, equation 9)."""
        summaries = probabilities.shape[3]
        padded = functional.pad(probabilities, (0, 1))
        importance = probabilities.new_zeros(*probabilities.shape[:3], self.first.shape[1])
        for after in range(1 - self.span, self.units):
            at = self.first + after
            at = torch.where((at < 0) | (at > summaries), summaries, at)[:, None, None].expand_as(importance)
            shared = min(self.units, after + self.span) - max(0, after)
            importance = importance + shared * padded.gather(3, at)
        return importance


def pick(importance: Tensor, numbers: Numbers, choosing: Choosing) -> Tensor:
    """Return the chosen blocks as :func:`choose` has them; ``importance`` [batch, choosers, time, blocks] of blocks as
    ``numbers`` numbers them."""
    blocks, device = importance.shape[3], importance.device
    begin, current = (item[:, None, :, None] for item in numbers[:2])
    index = torch.arange(blocks, device=device)
    bits = importance.float().contiguous().view(torch.int32)
    # Bits of floats as integers in the order of the floats, without the last ones, and the number of the block.
    key = ((bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)) >> _ROUNDED).long().mul_(1 << 32).add_(index)
    always = index < begin + choosing.first
    if choosing.near:
        always = always | (index >= current - choosing.near)
    if choosing.first or choosing.near:
        key = torch.where(always, (1 << 62) + index, key)
    key.masked_fill_((index < begin) | (index >= current), _NONE)
    top, chosen = key.topk(min(choosing.most, blocks), dim=-1, sorted=False)
    return chosen.masked_fill_(top == _NONE, -1)
