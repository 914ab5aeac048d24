"""Softmax attention over the pairs of any pattern, in time and memory that follow the number of pairs it allows.

PyTorch's FLOP counter cannot see inside the operator, so this file tells it the cost of a call: two products for a
computed pair forward, five backward, and the products with tables of keys and values, at all distances of a tile. On
the meta device, positions are unknown, and rows are assumed to begin together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import kinformer.runtime.flops  # noqa: F401 (products in place are counted)
from kinformer.core.pattern import Pattern
from kinformer.kernels.block_sparse import chunked
from kinformer.kernels.block_sparse.chunked import Call
from kinformer.kernels.block_sparse.plan import Interval, plan, stack

__all__ = ["Explanation", "chunked", "explain"]


class Explanation(NamedTuple):
    """The computed and the attended pairs of one head (the mean over heads where heads differ)."""

    computed: float
    attended: float

    @property
    def ratio(self) -> float:
        return self.computed / max(self.attended, 1)


def explain(pattern: Pattern, length: int, past: int = 0) -> Explanation:
    """Return how many pairs ``length`` queries after ``past`` tokens compute, and how many the pattern allows."""
    heads = [pattern.at(head) for head in range(pattern.num_heads or 1)]
    stacked = stack(pattern, Interval(0, past, past + length)) if len(heads) > 1 else None
    if stacked is not None:
        return Explanation(stacked.computed / len(heads), stacked.attended / len(heads))
    plans = [term for one in heads for term in plan(one, Interval(0, past, past + length))]
    computed, attended = (sum(getattr(term, name) for term in plans) / len(heads) for name in ("computed", "attended"))
    return Explanation(computed, attended)


def _pairs(call: Call) -> Iterator[tuple[int, int]]:
    """Yield over all rows and heads the pairs of every term, and the (query, distance) pairs of its tables."""
    pattern, (batch, q_heads, time, _), slots = call.visible, call.q.shape, call.k.shape[2]
    heads, interval = pattern.num_heads or 1, Interval(0, slots - time, slots)
    stacked = None if call.separate_heads or heads == 1 else stack(pattern, interval)
    if stacked is not None:
        yield batch * stacked.computed, 0
        return
    copies = batch * q_heads // heads
    for head in range(heads):
        for part in plan(pattern.at(head), interval):
            far = sum(
                (tile.last - tile.first) * (tile.width + (tile.last - tile.first - 1) * len(tile.runs))
                for tile in part.tiles
            )
            yield copies * part.computed, copies * far * part.stride


def _width(table: Tensor | None) -> int:
    return 0 if table is None else table.shape[-1]


def _inner(call: Call) -> int:
    """Return the width of the products that make the score of a pair."""
    return call.q.shape[-1] * (2 if call.form == "modulus" else 1)


@register_flop_formula(torch.ops.kinformer.block_sparse_attention, get_raw=True)
def forward_flops(*arguments: *Call, **_: object) -> int:
    """Return the floating-point operations of a forward call with the operator's arguments."""
    call = Call(*arguments)
    near, wide = _inner(call) + call.v.shape[-1], _width(call.keys) + _width(call.values)
    return sum(2 * (pairs * near + far * wide) for pairs, far in _pairs(call))


@register_flop_formula(torch.ops.kinformer.block_sparse_attention_backward, get_raw=True)
def backward_flops(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, *Call, bool, bool], **_: object) -> int:
    """Return the floating-point operations of a backward call with the operator's arguments."""
    call = Call(*arguments[4:-2])
    near, wide = 3 * _inner(call) + 2 * call.v.shape[-1], 3 * _width(call.keys) + 2 * _width(call.values)
    return sum(2 * (pairs * near + far * wide) for pairs, far in _pairs(call))
