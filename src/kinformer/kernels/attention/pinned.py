"""Attention to the first tokens of a sequence, which outlive a window (Xiao et al. 2023, StreamingLLM, section 3.2).

Token j < n is kept in slot j of ``Pinned``. A query at position t sees it here where it has left the window w, j <= t -
w, and stands at min(t, n + w - 1), its rank in the cache. Attention within the window is merged by log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.attention_state import Pinned
from kinformer.kernels.attention import attention
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility


def ranks(positions: Tensor, pinned: int, window: int) -> Tensor:
    """Return where queries at ``positions`` stand for the first tokens."""
    return positions.clamp_max(pinned + window - 1)


def attend(
    q: Tensor,
    new: Pinned,
    first: Pinned,
    positions: Tensor,
    window: int,
    resets: bool,
    scoring: Scoring,
    impl: AttentionImpl,
) -> Attended:
    """Return attention of queries q [batch, heads, time, head_dim] at ``positions`` [batch, time] to the first tokens.

    ``new``: the chunk's keys and values, ``first``: those pinned before it; ``resets``: whether a token of the chunk
    may begin a sequence. q and keys are turned by their ranks.
    """
    batch, _, time, _ = q.shape
    count = first.k.shape[2]
    slots, rank = torch.arange(count, device=q.device), ranks(positions, count, window)
    if resets:
        # Each query has first tokens of its own: it becomes a row of the batch.
        q, visibility, where = _rows(q, positions, slots, window, time)
        k, v = (_gathered(old, tokens, where).flatten(0, 1) for old, tokens in zip(first, new, strict=True))
        at, rank = slots.expand(batch * time, -1), rank.reshape(-1, 1)
    else:
        k, v = (
            torch.cat([old.to(tokens.dtype), tokens[:, :, :count]], 2) for old, tokens in zip(first, new, strict=True)
        )
        start = positions[:, :1]
        at = torch.cat([slots.expand(batch, -1), positions[:, :count]], 1)
        real = torch.cat([slots < start, positions[:, :count] < count], 1)
        seen = real[:, None] & (at[:, None] <= positions[:, :, None] - window)
        visibility = Visibility(attn_mask=seen[:, None])
    if scoring.relative is not None:
        visibility = visibility._replace(positions=rank, key_positions=at)
    out, lse = attention(q, k, v, visibility, scoring, impl=impl, lse=True)
    if resets:
        assert lse is not None
        out, lse = (x.unflatten(0, (batch, time)).squeeze(3).transpose(1, 2) for x in (out, lse))
    return Attended(out, lse)


def renewed(first: Pinned, new: Pinned, valid: Tensor | None, seen: Tensor) -> Pinned:
    """Return the pinned tokens after a chunk ``new`` whose tokens ``valid`` [batch, time] (None: all) are real;
    ``seen`` [batch] counts those of the sequence that goes on. Slots are zero where there is no token yet."""
    slots = torch.arange(first.k.shape[2], device=seen.device)
    count = new.k.shape[2] if valid is None else valid.sum(1)
    where = (slots + (count - seen)[:, None])[:, None]
    filled = (slots < seen[:, None])[:, None, :, None]
    return Pinned(
        *(
            torch.where(filled, _gathered(old, tokens, where)[:, 0], tokens.new_zeros(()))
            for old, tokens in zip(first, new, strict=True)
        )
    )


def _rows(q: Tensor, positions: Tensor, slots: Tensor, window: int, time: int) -> tuple[Tensor, Visibility, Tensor]:
    """Return each query as a row [batch * time, heads, 1, head_dim], what it sees, and the tokens of the chunk [batch,
    time, slots] that stand first in its sequence; they are negative where they stand before the chunk."""
    start = torch.arange(time, device=q.device) - positions
    seen = slots <= positions[:, :, None] - window
    rows = q.transpose(1, 2).flatten(0, 1)[:, :, None]
    return rows, Visibility(attn_mask=seen.flatten(0, 1)[:, None, None]), start[:, :, None] + slots


def _gathered(old: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Return the first tokens [batch, n, heads, slots, width] of n sequences: those of a chunk at ``where`` [batch, n,
    slots], and those of ``old`` where that is negative; any at all where it lies beyond the chunk."""
    count = old.shape[2]
    slots = torch.arange(count, device=where.device)
    index = torch.where(where < 0, slots, count + where).clamp_max(count + tokens.shape[2] - 1)
    every = torch.cat([old.to(tokens.dtype), tokens], 2)
    picked = index.flatten(1)[:, None, :, None].expand(-1, every.shape[1], -1, every.shape[3])
    return every.gather(2, picked).unflatten(2, index.shape[1:]).transpose(1, 2)
