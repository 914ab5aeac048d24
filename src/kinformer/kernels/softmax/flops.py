"""Tells PyTorch's ``FlopCounterMode`` what the products of the chunked kernel cost; it cannot see inside them.

Counted are the pairs that the tiles compute, hidden ones on their edges included: two products a pair forward, five
backward (the scores again, and one each for the gradients of probabilities, queries, keys and values). A ``reach``,
which can only spare work, is not looked at: formulas hold on the meta device too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import kinformer.core.flops  # noqa: F401 (products in place are counted)
from kinformer.kernels.softmax import chunked
from kinformer.kernels.softmax.tiles import Layout


def computed_pairs(q: Tensor, k: Tensor, limits: Sequence[int]) -> int:
    """The pairs of queries and slots, over all heads, that the tiles of one call compute."""
    layout = Layout.of(q, k, limits, reach=None)
    tiles = layout.tiles(chunked._rows_per_tile(layout), pairs=sys.maxsize)
    return layout.group * sum(math.prod(tile.shape) for tile in tiles)


@register_flop_formula(torch.ops.kinformer.softmax_attention, get_raw=True)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, reach: object, limits: Sequence[int], *_: Any, **__: Any) -> int:
    """Floating-point operations of a forward call with the operator's own arguments."""
    return 2 * computed_pairs(q, k, limits) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.kinformer.softmax_attention_backward, get_raw=True)
def backward_flops(
    grads: object, saved: Sequence[Tensor], reach: object, limits: Sequence[int], *_: Any, **__: Any
) -> int:
    """Floating-point operations of a backward call with the operator's own arguments."""
    q, k, v, *_outputs = saved
    return 2 * computed_pairs(q, k, limits) * (3 * q.shape[-1] + 2 * v.shape[-1])
