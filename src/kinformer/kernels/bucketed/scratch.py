"""The scratch memory of bucketed attention in a call: gathered lines of tokens, in float32 at least, and their indices.

Buckets are taken to be as full as chance makes them: the last tile of each is half empty.
"""

from __future__ import annotations

from typing import Any

import torch

from kinformer.core.contract import state_dtype
from kinformer.kernels.bucketed.chunked import SPARE, BucketedCall
from kinformer.kernels.bucketed.layout import PAIRS, rows_per_tile
from kinformer.runtime.workspace import scratch

NUMBERS, NUMBERS_OF_LINES = 8, 4
"""Arrays of int64 that a layout makes of every slot, and of every line."""
COMPILED = 28 * 650_000
"""oneDNN keeps what it compiled: products of blocks of each size, beyond those that all attention has."""


def _bytes(call: BucketedCall, of_lines: int, of_tokens: int, blocks: int) -> int:
    """Return the bytes of a call: ``of_lines`` and ``of_tokens`` numbers gathered for each
    line and token, scores of ``blocks``."""
    batch, heads, rounds, slots = call.runs.shape
    rows, size = rows_per_tile(call.size), state_dtype(call.q.dtype).itemsize
    runs = min(call.buckets, slots)
    lines = batch * heads * max(runs * rows, slots + runs * rows // 2)
    tokens = batch * heads * slots
    blocks += rounds > 1  # which keys an earlier round saw
    numbers = 8 * (NUMBERS * tokens + NUMBERS_OF_LINES * lines)
    return round(SPARE * size * (of_lines * lines + blocks * PAIRS)) + size * of_tokens * tokens + numbers + COMPILED


@scratch(torch.ops.kinformer.bucketed_attention)
def forward_bytes(*arguments: Any) -> int:
    """Return the bytes of a forward call: q, k, v and outputs by line; outputs
    of a round and of all rounds by token."""
    call = BucketedCall(*arguments)
    width, out = call.q.shape[-1], call.v.shape[-1]
    return _bytes(call, 2 * width + 2 * out, 2 * out, blocks=1)


@scratch(torch.ops.kinformer.bucketed_attention_backward)
def backward_bytes(*arguments: Any) -> int:
    """Return the bytes of a backward call: q, k, v, their gradients and the
    output's by line; the gradients' sums by token."""
    call = BucketedCall(*arguments[4:])
    width, out = call.q.shape[-1], call.v.shape[-1]
    return _bytes(call, 4 * width + 3 * out, 2 * width + out + max(width, out), blocks=2)
