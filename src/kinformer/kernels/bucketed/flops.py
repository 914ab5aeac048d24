"""FLOPs for PyTorch's ``FlopCounterMode``: what the products of attention within buckets cost; it cannot see inside
them.

Counted are the pairs that the tiles compute when all buckets are equally full, as only the data say how full they are:
two products a pair forward, five backward. The formulas hold on the meta device too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from kinformer.kernels.bucketed.chunked import BucketedCall
from kinformer.kernels.bucketed.layout import rows_per_tile


def computed_pairs(call: BucketedCall) -> int:
    """Return how many pairs of queries and slots, over all heads and rounds, the tiles of one call compute."""
    batch, heads, rounds, slots = call.runs.shape
    rows, past = rows_per_tile(call.size), slots - call.q.shape[2]
    per_chunk = call.size // rows
    full, more = divmod(slots, call.buckets)
    pairs = 0
    for length, runs in ((full, call.buckets - more), (full + 1, more)):
        tiles = range(past // call.buckets // rows, -(-length // rows))
        pairs += runs * sum(depth - max(0, depth // per_chunk - 1) * per_chunk + 1 for depth in tiles)
    return batch * heads * rounds * pairs * rows**2


@register_flop_formula(torch.ops.kinformer.bucketed_attention, get_raw=True)
def forward_flops(*arguments: Any, **_: Any) -> int:
    """Return the floating-point operations of a forward call with the operator's arguments."""
    call = BucketedCall(*arguments)
    return 2 * computed_pairs(call) * (call.q.shape[-1] + call.v.shape[-1])


@register_flop_formula(torch.ops.kinformer.bucketed_attention_backward, get_raw=True)
def backward_flops(*arguments: Any, **_: Any) -> int:
    """Return the floating-point operations of a backward call with the operator's arguments."""
    call = BucketedCall(*arguments[4:])
    return 2 * computed_pairs(call) * (3 * call.q.shape[-1] + 2 * call.v.shape[-1])
