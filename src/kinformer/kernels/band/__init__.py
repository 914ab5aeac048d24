"""Softmax attention over a band of distances (causal, local, full): tiles of queries with one interval of keys each.

The FLOPs for PyTorch's ``FlopCounterMode``, which cannot see inside the operators: counted are the pairs that the tiles
compute, masked ones on their edges included, two products a pair forward, five backward (the scores again, and one each
for the gradients of probabilities, queries, keys and values). A ``lookback``, which can only spare work, is ignored:
formulas hold on the meta device too.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import kinformer.runtime.flops  # noqa: F401 (products in place are counted)
from kinformer.kernels.band import chunked
from kinformer.kernels.band.chunked import BandCall, rows_per_tile
from kinformer.kernels.band.tiles import Layout

__all__ = ["chunked"]


def computed_pairs(call: BandCall) -> int:
    """Return how many pairs of queries and slots, over all heads, the tiles of one call compute."""
    layout = Layout.of(call.q, call.k, call.behind, call.ahead, lookback=None)
    tiles = layout.tiles(rows_per_tile(layout), pairs=sys.maxsize)
    return layout.group * sum(math.prod(tile.shape) for tile in tiles)


@register_flop_formula(torch.ops.kinformer.band_attention, get_raw=True)
def forward_flops(*arguments: *BandCall, **_: object) -> int:
    """Return the floating-point operations of a forward call with the operator's arguments."""
    call = BandCall(*arguments)
    # S = Q K^T and O = P V
    return 2 * computed_pairs(call) * (call.q.shape[-1] + call.v.shape[-1])


@register_flop_formula(torch.ops.kinformer.band_attention_backward, get_raw=True)
def backward_flops(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *BandCall], **_: object) -> int:
    """Return the floating-point operations of a backward call with the operator's arguments."""
    call = BandCall(*arguments[4:])
    # S again, dQ and dK are of the width of q; dP and dV of that of v.
    return 2 * computed_pairs(call) * (3 * call.q.shape[-1] + 2 * call.v.shape[-1])
