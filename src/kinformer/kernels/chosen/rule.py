"""The rule by which blocks are chosen, given how important each is for a query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDED = 6
"""Last bits of a float32 that rounding may move: importances that differ there alone are equal."""
_NONE = -(1 << 62)


class Choosing(NamedTuple):
    """How blocks are chosen: by so many ``choosers`` (query heads, or groups of them side by side) ``most`` blocks
    beside the current one, among them the ``first`` of the sequence and the ``near`` ones before it."""

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


def pick(importance: Tensor, numbers: Numbers, choosing: Choosing) -> Tensor:
    """Return the chosen blocks as :func:`choose` has them; ``importance`` [batch, choosers, time, blocks]."""
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
