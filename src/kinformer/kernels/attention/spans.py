"""Attention of queries that look unlike far back: each has a span z of its own in every head, and a soft mask.

    out_i = sum_j m_ij exp(s_ij) v_j / sum_j m_ij exp(s_ij),    log m_ij as the span says of z_i and i - j

A tile of queries meets the slots that the farthest-looking of them sees in a head, heads of like reach together; no
others are computed. Autograd saves a few numbers for each of these pairs. While a graph is captured, and where tensors
are shapes alone, every query is taken to look as far as any may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.core.span import TokenSpan
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility, attention
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.softmax.request import query_positions
from kinformer.runtime.host import has_data

_ROWS = 64


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    span: TokenSpan,
    visibility: Visibility,
    scoring: Scoring,
    impl: AttentionImpl = "auto",
) -> Tensor:
    """Return outputs [batch, q_heads, time, head_dim_v] for spans ``z`` [batch, q_heads, time] in tokens; the rest is
    as for ``kernels.attention.attention`` with a pattern. ``impl="reference"`` computes all pairs at once."""
    time = q.shape[2]
    rows = time if impl == "reference" else _ROWS
    call = (q, k, v, z, span, visibility, scoring, impl)
    return torch.cat([_tile(slice(first, min(first + rows, time)), *call) for first in range(0, time, rows)], 2)


def _tile(queries: slice, q: Tensor, k: Tensor, v: Tensor, z: Tensor, span: TokenSpan, *rest: Any) -> Tensor:
    reaches = [max(span.windows)] * q.shape[1] if rest[-1] == "reference" else _reaches(z[:, :, queries], span)
    groups: dict[int, list[int]] = {}
    for head, reach in enumerate(reaches):
        groups.setdefault(reach, []).append(head)
    parts = [_seen(queries, group, reach, q, k, v, z, span, *rest) for reach, group in groups.items()]
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([head for group in groups.values() for head in group], device=q.device).argsort()
    return torch.cat(parts, 1)[:, order]


def _reaches(z: Tensor, span: TokenSpan) -> list[int]:
    """Return how many tokens back the farthest-looking query of ``z`` [batch, heads, queries] sees, head by head."""
    if torch.compiler.is_compiling() or not has_data(z):
        return [max(span.windows)] * z.shape[1]
    return [span.reach(item) for item in z.detach().amax((0, 2)).tolist()]


def _seen(queries: slice, members: list[int], reach: int, *call: Any) -> Tensor:
    """Attend from ``queries`` of the heads ``members`` to the ``reach`` slots before each of them."""
    q, k, v, z, span, visibility, scoring, impl = call
    past = k.shape[2] - q.shape[2]
    slots = slice(max(0, past + queries.start - reach), past + queries.stop - 1)
    if slots.stop <= slots.start:
        return q.new_zeros(q.shape[0], len(members), queries.stop - queries.start, v.shape[-1])
    places = torch.arange(past + queries.start, past + queries.stop, device=q.device)
    keys_at = torch.arange(slots.start, slots.stop, device=q.device)
    distance = places[:, None] - keys_at
    positions = query_positions(visibility, q, k.shape[2])[:, queries]
    if len(members) < q.shape[1]:
        group = q.shape[1] // k.shape[1]
        k, v = (tensor[:, [head // group for head in members]] for tensor in (k, v))
        scoring = _of_heads(scoring, members)
    # m exp(s) = exp(s + log m): the soft mask m is a bias of the scores.
    bias = span.log_mask(z[:, members, queries, None], distance)
    visibility_ = Visibility(attn_mask=_allowed(visibility, members, positions, distance))
    if scoring.relative is not None:  # by distances of slots, which all rows have in common
        every = (len(q), -1)
        visibility_ = visibility_._replace(positions=places.expand(every), key_positions=keys_at.expand(every))
    if scoring.dropout is not None:
        p, seed = scoring.dropout
        # Every tile is a call with indices from 0, so it needs a seed of its own, or all tiles would drop alike.
        scoring = scoring._replace(dropout=AttentionDropout(p, seed + queries.start * q.shape[1] + members[0]))
    scoring = scoring._replace(bias=bias)
    q, k, v = q[:, members, queries], k[:, :, slots], v[:, :, slots]
    return attention(q, k, v, visibility_, scoring, impl=impl).out


def _allowed(visibility: Visibility, members: Sequence[int], positions: Tensor, distance: Tensor) -> Tensor:
    """Return which pairs the pattern allows to queries at ``positions`` [batch,
    queries], [batch, heads or 1, queries, slots]."""
    pattern = visibility.pattern
    assert pattern is not None
    q = positions[:, :, None]
    k = q - distance
    heads = [0] if pattern.num_heads is None else members
    return torch.stack([pattern.at(head).allowed(q, k) & (k >= 0) for head in heads], 1)


def _of_heads(scoring: Scoring, members: list[int]) -> Scoring:
    """Return ``scoring`` with the tables, vectors and sinks of the heads ``members`` only."""

    def some(table: Tensor | None) -> Tensor | None:
        return table if table is None or len(table) == 1 else table[members]

    relative = scoring.relative
    if relative is not None:
        _, *tables = relative
        relative = Relative(relative.lowest, *map(some, tables))
    return scoring._replace(vector=some(scoring.vector), relative=relative, sink=some(scoring.sink))
