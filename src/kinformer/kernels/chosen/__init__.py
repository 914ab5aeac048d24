"""Causal attention to the query's own block of keys and to blocks that the query chooses by the means of their keys.

MoBA (Lu et al. 2025, arXiv 2502.13189) and the selected branch of NSA (Yuan et al. 2025, arXiv 2502.11089):

    out_t = softmax_j(scale * q_t . k_j) v_j    over keys j <= t in the chosen blocks and in the current block

Blocks are cut by position, so the keys that a query sees depend on the past alone. Query heads that choose together
see the same blocks.

PyTorch's FLOP counter and the estimator of memory cannot see inside the operators, so this file tells them the cost
of a call with one sequence per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kinformer.core.contract import state_dtype
from kinformer.kernels import ChosenImpl, names_of
from kinformer.kernels.chosen import chunked
from kinformer.kernels.chosen.choice import (
    SCORES,
    Blocks,
    Choosing,
    Cover,
    MeansCall,
    Numbers,
    Uncovered,
    attend_means,
    blocks_of,
    choose,
    pick,
    steps,
)
from kinformer.kernels.chosen.chunked import LINES, PAIRS, ChosenCall, attend_few
from kinformer.kernels.softmax import count_products
from kinformer.runtime.autograd import transformed
from kinformer.runtime.compiling import scratch
from kinformer.runtime.errors import KinformerError

# Attention to chosen blocks pair by pair: which keys a query sees as a mask over all pairs, in any dtype.


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


__all__ = ["IMPLS", "Blocks", "Choosing", "Cover", "Numbers", "attend_means", "blocks_of", "choose", "chosen_attention"]

IMPLS = names_of(ChosenImpl)
FEW = 8
"""So many queries are computed from gathered blocks."""


def chosen_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, blocks: Blocks, *, scale: float, impl: ChosenImpl = "auto"
) -> Tensor:
    """Return the outputs [batch, heads, time, head_dim_v] of queries over their chosen blocks and their current one.

    q: [batch, heads, time, head_dim], of the last ``time`` slots. k, v: [batch, kv_heads, slots, width], right-aligned.
    chosen: [batch, choosers, time, count] int64 (``choice``), complete blocks before the current one, each once, -1 for
        none; choosers divide heads, kv_heads divide choosers.
    impl: "reference" (all pairs), "chunked" (work follows the pairs), or "auto", which is "chunked".

    Raises KinformerError for an unknown ``impl`` and for shapes that do not fit.
    """
    if impl not in IMPLS:
        raise KinformerError(f"chosen_attention: impl={impl!r} is unknown; use one of {', '.join(IMPLS)}.")
    heads, kv_heads, choosers = q.shape[1], k.shape[1], chosen.shape[1]
    if heads % choosers or choosers % kv_heads or k.shape[:3] != v.shape[:3] or q.shape[2] > k.shape[2]:
        raise KinformerError(
            f"chosen_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and choices "
            f"{tuple(chosen.shape)} do not fit; pass [batch, heads, time, width], with slots of the past and of all "
            "queries, heads a multiple of the choosers, and these of the heads of keys."
        )
    if impl == "reference" or (impl == "auto" and transformed()):
        return dense(q, k, v, chosen, blocks, scale)
    call = ChosenCall(q, k, v, chosen, blocks.first, blocks.current, blocks.offset, blocks.size, blocks.aligned, scale)
    return attend_few(call) if q.shape[2] <= FEW else chunked.attend(call)


def seen_pairs(call: ChosenCall) -> int:
    """Return how many pairs of queries and keys a call computes in all heads, without spare lines."""
    batch, heads, time, _ = call.q.shape
    past, count, size = call.k.shape[2] - time, call.chosen.shape[3], call.size
    full = max(0, past + time - max(past, count * size))  # queries after as many blocks as they may choose
    before = range(past, past + time - full)
    return batch * heads * size * (time + full * count + sum(position // size for position in before))


count_products("chosen_blocks", lambda *call: seen_pairs(ChosenCall(*call)), first=3)


def _lines(call: ChosenCall) -> int:
    """Return the bytes of a part of the queries: their lines, their tiles, and the map of lines."""
    batch, _, time, _ = call.q.shape
    choosers, count, blocks = call.chosen.shape[1], call.chosen.shape[3], call.first.shape[1]
    lines = min(LINES, batch * call.q.shape[1] * time * (count + 1))
    queries = max(1, lines // (count + 1))
    size, width = state_dtype(call.q.dtype).itemsize, call.q.shape[-1]
    pairs = size * PAIRS * 3
    return lines * (size * width + 40) + queries * size * 2 * width + pairs + 9 * choosers * blocks * queries


@scratch(torch.ops.kinformer.chosen_blocks)
def forward_bytes(*arguments: *ChosenCall) -> int:
    """Return the bytes of a forward call: a part's lines; keys and values by block where they do not stand so."""
    call = ChosenCall(*arguments)
    aligned = call.aligned and call.k.shape[2] % call.size == 0
    return _lines(call) + (0 if aligned else (call.k.numel() + call.v.numel()) * state_dtype(call.q.dtype).itemsize)


@scratch(torch.ops.kinformer.chosen_blocks_backward)
def backward_bytes(*arguments: *tuple[Tensor, Tensor, Tensor, *ChosenCall]) -> int:
    """Return the bytes of a backward call: the bytes of the forward call plus gradients of keys and values by block."""
    call = ChosenCall(*arguments[3:])
    return forward_bytes(*arguments[3:]) + (call.k.numel() + call.v.numel()) * state_dtype(call.q.dtype).itemsize


def _scored(call: MeansCall) -> int:
    """Return how many pairs of a query and a mean a call computes in all heads."""
    time, blocks, parts = call.q.shape[2], call.k.shape[2], list(steps(call))
    seen = (blocks if len(parts) == 1 else min(blocks, -(-part.stop * blocks // time)) for part in parts)
    pairs = sum((part.stop - part.start) * some for part, some in zip(parts, seen, strict=True))
    return call.q.shape[0] * call.q.shape[1] * pairs


@register_flop_formula(torch.ops.kinformer.choose_blocks, get_raw=True)
def choice_flops(*arguments: *Uncovered, **_: object) -> int:
    """Return the floating-point operations of a choice: a product for every query and mean."""
    call = MeansCall(*arguments)
    return 2 * _scored(call) * call.q.shape[3]


count_products("attend_means", lambda *call: _scored(MeansCall(*call)), first=4)


@scratch(torch.ops.kinformer.choose_blocks)
@scratch(torch.ops.kinformer.attend_means)
def scores_bytes(*arguments: Any) -> int:
    """Return the bytes of the scores of some queries, their probabilities, and two numbers of 64 bits to order them."""
    call = MeansCall(*arguments)
    scores = min(SCORES, call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2])
    return scores * (2 * state_dtype(call.q.dtype).itemsize + 16)


@scratch(torch.ops.kinformer.attend_means_backward)
def scores_backward_bytes(*arguments: Any) -> int:
    """Return the bytes of the scores of some queries and their gradients."""
    return scores_bytes(*arguments[4:])
