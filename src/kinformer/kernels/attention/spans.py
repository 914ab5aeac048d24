"""Attention of queries that look unlike far back: each has a span z of its own in every head, and a soft mask.

    out_i = sum_j m_ij exp(s_ij) v_j / sum_j m_ij exp(s_ij),    log m_ij as the span says of z_i and i - j

A tile of queries meets the slots that the farthest-looking of them sees in a head, heads of like reach together; no
others are computed. Autograd saves a few numbers for each of these pairs. While a graph is captured, and where tensors
are shapes alone, every query is taken to look as far as any may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.parts import Relative
from kinformer.core.span import TokenSpan
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility, attention
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.softmax.request import query_positions
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.host import has_data
from kinformer.runtime.matmul import product_dtype

_ROWS = 64
_Call = tuple[Visibility, Scoring, AttentionImpl]


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


def _tile(queries: slice, q: Tensor, k: Tensor, v: Tensor, z: Tensor, span: TokenSpan, *rest: *_Call) -> Tensor:
    reaches, least = _reaches(z[:, :, queries], span, rest[-1])
    groups: dict[int, list[int]] = {}
    for head, reach in enumerate(reaches):
        groups.setdefault(reach, []).append(head)
    call = (q, k, v, z, span, *rest)
    parts = [_seen(queries, group, reach, min(least[head] for head in group), *call) for reach, group in groups.items()]
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([head for group in groups.values() for head in group], device=q.device).argsort()
    return torch.cat(parts, 1)[:, order]


def _reaches(z: Tensor, span: TokenSpan, impl: AttentionImpl) -> tuple[list[int], list[float]]:
    """Return how many tokens back the farthest-looking query of ``z`` [batch, heads, queries] sees, and the least span,
    head by head; the bounds of all spans where the host reads none."""
    if impl == "reference" or torch.compiler.is_compiling() or not has_data(z):
        return [max(span.windows)] * z.shape[1], [0.0] * z.shape[1]
    shortest, longest = z.detach().transpose(0, 1).flatten(1).aminmax(dim=1)
    return [span.reach(item) for item in longest.tolist()], shortest.tolist()


def _seen(
    queries: slice,
    members: list[int],
    reach: int,
    least: float,
    *call: *tuple[Tensor, Tensor, Tensor, Tensor, TokenSpan, *_Call],
) -> Tensor:
    """Attend from ``queries`` of the heads ``members``, whose spans are ``least`` tokens or more, to the ``reach``
    slots before each of them."""
    q, k, v, z, span, visibility, scoring, impl = call
    past = k.shape[2] - q.shape[2]
    slots = slice(max(0, past + queries.start - reach), past + queries.stop - 1)
    if slots.stop <= slots.start:
        return q.new_zeros(q.shape[0], len(members), queries.stop - queries.start, v.shape[-1])
    places = torch.arange(past + queries.start, past + queries.stop, device=q.device)
    keys_at = torch.arange(slots.start, slots.stop, device=q.device)
    distance = places[:, None] - keys_at
    positions = query_positions(visibility, q, k.shape[2])[:, queries]
    if scoring.dropout is not None:
        p, seed = scoring.dropout
        # Every tile is a call with indices from 0, so it needs a seed of its own, or all tiles would drop alike.
        scoring = scoring._replace(dropout=AttentionDropout(p, seed + queries.start * q.shape[1] + members[0]))
    if len(members) < q.shape[1]:
        group = q.shape[1] // k.shape[1]
        k, v = (tensor[:, [head // group for head in members]] for tensor in (k, v))
        q, z, scoring = q[:, members], z[:, members], _of_heads(scoring, members)
    q, k, v = q[:, :, queries], k[:, :, slots], v[:, :, slots]
    # m exp(s) = exp(s + log m): the soft mask m is a bias of the scores, and 1 where no query's span has ended.
    farthest = past + queries.stop - 1 - slots.start
    soft = min(len(keys_at), max(0, farthest - math.ceil(least)))
    bias = pad(span.log_mask(z[:, :, queries, None], distance[:, :soft]), (0, len(keys_at) - soft))
    visibility_ = Visibility(attn_mask=_allowed(visibility, members, positions, distance))
    relative = scoring.relative
    if relative is not None and impl != "reference" and relative.values is None and relative.factor is None:
        bias = bias + by_distance(q, relative, scoring.scale, farthest, len(keys_at)).to(bias.dtype)
        scoring = scoring._replace(relative=None)
    elif relative is not None:  # by distances of slots, which all rows have in common
        every = (len(q), -1)
        visibility_ = visibility_._replace(positions=places.expand(every), key_positions=keys_at.expand(every))
    return attention(q, k, v, visibility_, scoring._replace(bias=bias), impl=impl).out


def by_distance(q: Tensor, relative: Relative, scale: float, farthest: int, slots: int) -> Tensor:
    """Return what ``relative`` adds to the scores of q [batch, heads, m, head_dim] and of ``slots`` keys in a row, the
    first of which is ``farthest`` tokens before the last query: [batch or 1, heads or 1, m, slots]."""
    time = q.shape[2]
    lowest = farthest - time - slots + 2  # of the first query and the last key
    met: Tensor | None = None
    if relative.keys is not None:
        q = q.to(product_dtype(q))
        shifted = q if relative.shift is None else q + relative.shift.to(q.dtype)
        with no_autocast(q.device):
            met = scale * (shifted @ _descending(relative.keys, relative.lowest, lowest, farthest).to(q.dtype).mT)
    if relative.bias is not None:
        bias = _descending(relative.bias, relative.lowest, lowest, farthest)[None, :, None]
        met = bias.expand(-1, -1, time, -1) if met is None else met + bias
    assert met is not None
    if time == 1:
        return met
    # Row i has the distances of its keys from column time - 1 - i on: rows that are shorter by one put them in line.
    width = met.shape[3] - 1
    flat = met.reshape(*met.shape[:2], -1)[:, :, time - 1 : -1]
    return flat.unflatten(2, (time, width))[..., :slots]


def _descending(table: Tensor, first: int, lowest: int, highest: int) -> Tensor:
    """Return the entries of ``table`` [heads or 1, n, ...], of the distances from ``first`` on, at the distances
    ``highest`` ... ``lowest``, 0 where there are none."""
    top, bottom = min(highest, first + table.shape[1] - 1), max(lowest, first)
    if top < bottom:
        return table.new_zeros(table.shape[0], highest - lowest + 1, *table.shape[2:])
    part = table[:, bottom - first : top - first + 1].flip(1)
    return pad(part, (0, 0) * (table.dim() - 2) + (highest - top, bottom - lowest))


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
