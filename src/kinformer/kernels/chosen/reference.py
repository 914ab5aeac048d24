"""Attention to chosen blocks pair by pair: which keys a query sees as a mask over all pairs, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.chosen.choice import Blocks, Choosing, Cover, Numbers, pick


def numbers_of_slots(blocks: Blocks, slots: int) -> tuple[Tensor, Tensor]:
    """Return the number of each slot's block, -1 before the first, and its place there, [batch, slots] int64 each."""
    index = torch.arange(slots, device=blocks.first.device)
    reached = blocks.first[:, None] <= index[:, None]
    number = reached.sum(2) - 1
    first = blocks.first.gather(1, number.clamp_min(0))
    return number, index - first


def visible(chosen: Tensor, blocks: Blocks, slots: int) -> Tensor:
    """Return which slots each query sees, bool [batch, choosers, time, slots]."""
    number, place = numbers_of_slots(blocks, slots)
    number, place = number[:, None, None], place[:, None, None]
    current = (number == blocks.current[:, None, :, None]) & (place <= blocks.offset[:, None, :, None])
    others = (number.unsqueeze(-1) == chosen.unsqueeze(3)).any(-1) & (number >= 0)
    return (current | others) & (place < blocks.size)


def dense(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, blocks: Blocks, scale: float) -> Tensor:
    """Attend over all pairs; as :func:`kernels.chosen.chosen_attention`."""
    wide, heads = state_dtype(q.dtype), q.shape[1]
    k, v = (x.to(wide).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    seen = visible(chosen, blocks, k.shape[2]).repeat_interleave(heads // chosen.shape[1], 1)
    weights = (q.to(wide) @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).to(q.dtype)


def shared(cover: Cover, summaries: int) -> Tensor:
    """Return how many units each block shares with each summary, [batch, blocks, summaries]."""
    unit = torch.arange(summaries + cover.span, device=cover.first.device)
    covered = (unit >= unit[:summaries, None]) & (unit < unit[:summaries, None] + cover.span)
    first = cover.first.unsqueeze(-1)
    inside = (unit >= first) & (unit < first + cover.units)
    return (inside[:, :, None] & covered).sum(-1)


def means(
    q: Tensor, k: Tensor, v: Tensor, numbers: Numbers, scale: float, choosing: Choosing, cover: Cover | None = None
) -> tuple[Tensor, Tensor]:
    """Attend over all pairs of queries and means, and choose; as :func:`kernels.chosen.choice.attend_means`."""
    wide, heads, together = state_dtype(q.dtype), q.shape[1], q.shape[1] // choosing.choosers
    k, v = (x.to(wide).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    index = torch.arange(k.shape[2], device=q.device)
    seen = (index >= numbers.begin[..., None]) & (index < numbers.complete[..., None])
    scores = (q.to(wide) @ k.mT * scale).masked_fill(~seen[:, None], -torch.inf)
    blind = ~seen.any(-1)[:, None, :, None]
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    importance = scores if together == 1 and cover is None else weights.unflatten(1, (-1, together)).sum(2)
    if cover is not None:
        importance = torch.einsum("bhtc,buc->bhtu", importance, shared(cover, len(index)).to(wide))
        numbers = Numbers(cover.begin, cover.current, cover.current)
    return (weights @ v).to(q.dtype), pick(importance.detach(), numbers, choosing)
