"""Attention over the pairs of a pattern by PyTorch's FlexAttention: for a GPU, where it is compiled into one kernel.

    out = softmax(score_mod(scale * Q K^T)) V over the pairs of mask_mod

``mask_mod`` is the pattern's ``allowed``, ``score_mod`` what distances add. Blocks of 128 x 128 pairs are sorted into
empty, partial and full ones by the pattern's ``cover``; single pairs are looked at inside the kernel. On a CPU it runs
uncompiled and without gradients, which is good for tests only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kinformer.core.pattern import ALL, SOME, Boxes, Pattern
from kinformer.kernels.block_sparse.plan import Interval
from kinformer.kernels.softmax.merge import with_sink
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility, query_positions
from kinformer.runtime.errors import KinformerError

_BLOCK = 128
_GRAPHS = 64
"""Patterns, shapes and dtypes that are compiled; beyond PyTorch's usual eight it would compute dense scores."""


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v] of products plus a bias by distance.

    Errors: rows of different positions, or that are reset in mid-chunk; float64 on a GPU.
    """
    assert visibility.pattern is not None
    if q.dtype == torch.float64 and q.device.type == "cuda":
        raise KinformerError("attention: impl='flex' knows no float64 on a GPU; use impl='chunked'.")
    past = k.shape[2] - q.shape[2]
    # Sequences that begin with the call do so at position 0, and the device need not be waited for.
    first = 0 if visibility.whole and not past else _first(query_positions(visibility, q, k.shape[2]))
    # Slots before ``oldest`` have negative positions: they hold no token of the sequence.
    oldest = max(0, past - first)
    interval = Interval(first - (past - oldest), first, first + q.shape[2])
    k, v = k[:, :, oldest:], v[:, :, oldest:]
    mask = _mask(visibility.pattern, interval, q.shape[1], str(q.device))
    run = _compiled() if q.device.type == "cuda" else _plain()
    padding = None if visibility.key_padding_mask is None else visibility.key_padding_mask[:, oldest:]
    with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        out, sums = run(
            q, k, v, score_mod=_score(scoring, past - oldest, padding, q.dtype), block_mask=mask, scale=scoring.scale,
            enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=scoring.sink is not None),
        )  # fmt: skip
    return with_sink(Attended(out, sums.lse), scoring.sink)


def _plain() -> Callable[..., Any]:
    return flex_attention


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _first(positions: Tensor) -> int:
    offset = positions - torch.arange(positions.shape[1], device=positions.device)
    if not bool((offset == offset[0, 0]).all()):
        raise KinformerError(
            "attention: impl='flex' needs rows at equal positions that count up by one, "
            "but these differ or are reset; use impl='chunked'."
        )
    return int(positions[0, 0])


def _score(scoring: Scoring, past: int, padding: Tensor | None, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return the ``score_mod`` of a call: it adds the bias by distance, and -inf at keys that are padding."""
    relative = scoring.relative
    bias = None if relative is None else relative.bias
    if relative is None or bias is None:
        if padding is None:
            return None
        return lambda score, batch, head, query, key: torch.where(padding[batch, key], -torch.inf, score)
    lowest = relative.lowest
    bias = bias.to(torch.promote_types(dtype, torch.float32))  # the scores' type, which Triton adds no other to

    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = past + query - key - lowest
        inside = (index >= 0) & (index < bias.shape[1])
        row = head if bias.shape[0] > 1 else torch.zeros_like(head)
        score = torch.where(inside, score + bias[row, index.clamp(0, bias.shape[1] - 1)], score)
        return score if padding is None else torch.where(padding[batch, key], -torch.inf, score)

    return score


@lru_cache(maxsize=64)
def _mask(pattern: Pattern, interval: Interval, heads: int, device: str) -> BlockMask:
    """Sort the blocks of pairs into empty, partial and full ones (per head where heads differ) for ``BlockMask``."""
    count = pattern.num_heads or 1
    covers = np.stack([_cover(pattern.at(head), interval) for head in range(count)])
    partial, full = (_indices(torch.from_numpy(covers == kind)) for kind in (SOME, ALL))

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        q, k = query + interval.query, key + interval.key
        seen = pattern.at(0).allowed(q, k)
        for other in range(1, count):
            seen = torch.where(head == other, pattern.at(other).allowed(q, k), seen)
        return seen & (q < interval.stop) & (k < interval.stop)

    lengths = interval.stop - interval.query, interval.stop - interval.key
    some, some_index, every, every_index = (x.to(device) for x in (*partial, *full))
    return BlockMask.from_kv_blocks(
        some, some_index, every, every_index, BLOCK_SIZE=_BLOCK, mask_mod=allowed, seq_lengths=lengths
    )


def _cover(pattern: Pattern, interval: Interval) -> np.ndarray:
    """Return the pattern's cover of all blocks, [query blocks, key blocks]."""
    q = np.arange(interval.query, interval.stop, _BLOCK)
    k = np.arange(interval.key, interval.stop, _BLOCK)
    low, key = (side.ravel() for side in np.meshgrid(q, k, indexing="ij"))
    high, key_high = (np.minimum(side + _BLOCK, interval.stop) - 1 for side in (low, key))
    # FlexAttention reads a full block without its mask, so a block that the edge cuts off counts as partial.
    whole = (high - low == _BLOCK - 1) & (key_high - key == _BLOCK - 1)
    cover = pattern.cover(Boxes(low, high, key, key_high))
    return np.where(whole, cover, np.minimum(cover, SOME)).reshape(len(q), len(k))


def _indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts [1, heads, query blocks] and indices [1, heads, query blocks,
    key blocks], the chosen blocks first."""
    order = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True)
    return chosen.sum(-1).to(torch.int32)[None], order.to(torch.int32)[None]
