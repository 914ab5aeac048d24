"""Tells PyTorch's ``FlopCounterMode`` what the products of the tiled kernel cost; it cannot see inside them.

Counted are the pairs that tiles compute, for rows that begin together (formulas hold on the meta device, which has no
positions): two products a pair forward, five backward, and those of tables of keys and values, whose distances are a
tile's keys and queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import kinformer.core.flops  # noqa: F401 (products in place are counted)
from kinformer.kernels.block_sparse.chunked import pattern_of, words_of
from kinformer.kernels.block_sparse.plan import Interval, plan
from kinformer.kernels.block_sparse.stack import stack


def _pairs(q: Tensor, k: Tensor, number: int, apart: bool) -> Iterator[tuple[int, int]]:
    """Over all rows and heads: the pairs of every term, and the (query, distance) pairs of its tables."""
    pattern, past = pattern_of(number), k.shape[2] - q.shape[2]
    heads = pattern.num_heads or 1
    copies = q.shape[0] * q.shape[1] // heads
    stacked = None if apart or heads == 1 else stack(pattern, Interval(0, past, k.shape[2]))
    if stacked is not None:
        yield q.shape[0] * stacked.computed, 0
        return
    for head in range(heads):
        for part in plan(pattern.at(head), Interval(0, past, k.shape[2])):
            far = sum(
                (tile.last - tile.first) * (tile.width + (tile.last - tile.first - 1) * len(tile.runs))
                for tile in part.tiles
            )
            yield copies * part.computed, copies * far * part.stride


def _width(tables: Sequence[Tensor], form: str, name: str) -> int:
    """The width of the table called ``name``, 0 if there is none."""
    named = dict(zip(words_of(form)[1:], tables, strict=True))
    return named[name].shape[-1] if name in named else 0


@register_flop_formula(torch.ops.kinformer.block_sparse_attention, get_raw=True)
def forward_flops(
    q: Tensor, k: Tensor, v: Tensor, places: object, tables: Sequence[Tensor], form: str, *numbers: Any, **_: Any
) -> int:
    """Floating-point operations of a forward call with the operator's own arguments."""
    inner = q.shape[-1] * (2 if form.startswith("modulus") else 1)
    wide = _width(tables, form, "keys") + _width(tables, form, "values")
    return sum(
        2 * (pairs * (inner + v.shape[-1]) + far * wide) for pairs, far in _pairs(q, k, numbers[0][0], bool(tables))
    )


@register_flop_formula(torch.ops.kinformer.block_sparse_attention_backward, get_raw=True)
def backward_flops(
    grads: object,
    saved: Sequence[Tensor],
    places: object,
    tables: Sequence[Tensor],
    form: str,
    integers: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Floating-point operations of a backward call with the operator's own arguments."""
    q, k, v, *_others = saved
    inner = q.shape[-1] * (2 if form.startswith("modulus") else 1)
    wide = 3 * _width(tables, form, "keys") + 2 * _width(tables, form, "values")
    return sum(
        2 * (pairs * (3 * inner + 2 * v.shape[-1]) + far * wide)
        for pairs, far in _pairs(q, k, integers[0], bool(tables))
    )
