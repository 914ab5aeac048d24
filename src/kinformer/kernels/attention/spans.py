"""Softmax attention over several sets of keys: pinned tokens, learnt spans, and one stretch of a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from kinformer.core.attention_state import Past, Pinned, PinnedState, SpanState
from kinformer.core.contract import state_dtype
from kinformer.core.crossing import Crossing, Row
from kinformer.core.parts import Relative, TokenSpan
from kinformer.core.pattern import Band, Pattern
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility, attention, merge
from kinformer.kernels.softmax import Attended, query_positions
from kinformer.runtime.autograd import Context, no_autocast
from kinformer.runtime.compiling import has_data
from kinformer.runtime.process import product_dtype

# Softmax attention whose keys and values go round the processes of a row (Liu, Zaharia and Abbeel 2023, Ring
# Attention, 2310.01889), piece by piece joined by ``merge``.
#
# At step d process r has the keys and values of stretch r - d; causal queries need none of later stretches, so none is
# sent to them. The backward sends them round again and recomputes each piece's attention, so that one piece is held
# at a time:
#
#     w_d = exp(lse_d - lse),   d out_d = w_d d out,   d lse_d = w_d (d lse + d out . (out_d - out))

_EVERY = Band(ahead=None)
_RingCall = tuple[Visibility, Scoring, AttentionImpl]


def around(
    qkv: tuple[Tensor, Tensor, Tensor],
    visibility: Visibility,
    scoring: Scoring,
    impl: AttentionImpl,
    crossing: Crossing | None,
    lse: bool,
) -> Attended:
    """Return ``attention`` of q [batch, heads, time, head_dim] to k and v. With a ``crossing``, k and v belong to one
    stretch of a row, and the keys and values of earlier stretches go round the processes. Scores are dot products."""
    q, k, v = qkv
    local = attention(q, k, v, visibility, scoring, impl=impl, lse=lse or crossing is not None)
    if crossing is None:
        return local
    call = visibility, Scoring(scoring.scale, dropout=scoring.dropout), impl
    return merge(local, Attended(*_Around.apply(q, torch.cat([k, v], dim=-1), crossing, call)))


def _piece(q: Tensor, kv: Tensor, distance: int, call: Any) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of q over ``kv`` [batch, heads, time, width_k + width_v] of an earlier stretch."""
    visibility, scoring, impl = call
    time, width = q.shape[2:]
    # Slot s of the piece holds position p - (i + distance * time - s), and a negative one is another sequence's.
    moved = visibility._replace(pattern=_EVERY, positions=visibility.positions - distance * time)
    k, v = kv.split([width, kv.shape[3] - width], dim=-1)
    out, lse = attention(q, k, v, moved, scoring, impl=impl, lse=True)
    assert lse is not None
    return out, lse


class _Around(torch.autograd.Function):
    """Output and log-sum-exp over the keys and values of earlier stretches."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, kv: Tensor, crossing: Crossing, call: _RingCall) -> tuple[Tensor, Tensor]:
        total = None
        for distance, piece in _pieces(kv, crossing):
            part = Attended(*_piece(q, piece, distance, call))
            total = part if total is None else merge(total, part)
        if total is None:  # the first stretch
            width = kv.shape[3] - q.shape[3]
            out = q.new_zeros(*q.shape[:3], width)
            total = Attended(out, q.new_full(q.shape[:3], -torch.inf, dtype=state_dtype(q.dtype)))
        assert total.lse is not None
        ctx.crossing, ctx.call = crossing, call
        ctx.save_for_backward(q, kv, *total)
        return total.out, total.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        crossing: Crossing = ctx.crossing
        d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv, memory_format=torch.contiguous_format)
        gradients = {}
        for distance, piece in _pieces(kv, crossing):
            with torch.enable_grad():
                query, piece = q.detach().requires_grad_(), piece.requires_grad_()
                out_d, lse_d = _piece(query, piece, distance, ctx.call)
                weight = torch.where(lse_d > -torch.inf, (lse_d - lse).exp(), lse_d.new_zeros(())).detach()
                along = (d_out * (out_d.detach() - out)).sum(-1).to(lse.dtype)
                upstream = [weight[..., None].to(d_out.dtype) * d_out, weight * (d_lse + along)]
                d_query, gradients[distance] = torch.autograd.grad([out_d, lse_d], [query, piece], upstream)
            d_q += d_query
        for distance in range(1, crossing.count):
            room = torch.empty_like(d_kv)
            if crossing.exchange(
                gradients.pop(distance, None), crossing.number - distance, room, crossing.number + distance
            ):
                d_kv += room
        return d_q, d_kv, None, None


def _pieces(kv: Tensor, crossing: Crossing) -> Iterator[tuple[int, Tensor]]:
    """Yield how far before this stretch each earlier one stands, nearest first, and its keys and values."""
    piece: Tensor | None = kv
    for distance in range(1, crossing.count):
        room = torch.empty_like(kv, memory_format=torch.contiguous_format) if distance <= crossing.number else None
        crossing.exchange(piece, crossing.number + 1, room, crossing.number - 1)
        piece = room
        if room is not None:
            yield distance, room


# What the queries of a chunk see. A mixer makes one :class:`Reach` for each chunk and calls it on its way.


class Reach:
    """The queries of one chunk see the slots that the mixer's pattern allows, and nothing else.

    Of the softmax ``mixer`` a reach uses ``position``, ``score``, ``impl``, ``scoring(farthest)`` (how pairs of tokens
    up to this distance are scored, with a new seed of a dropout), ``values(v)`` (the values as heads read them) and
    ``pins``: how many first tokens the pattern keeps, and the size of its window, the token itself included.
    """

    def __init__(self, mixer: Any, state: Any, past: Past, x: Tensor) -> None:
        """Begin with the ``state`` before the chunk, its ``past`` and the mixer's input x [batch, time, dim]."""
        self.mixer, self.past = mixer, past

    def project(self, q: Tensor, k: Tensor) -> None:
        """Take note of queries and keys before a position turns them."""

    def slots(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """Return the leaves of the chunk's slots as queries see them, and as a state holds them (None: the same)."""
        return (k, v), None

    def scoring(self, slots: Sequence[Any]) -> Scoring:
        scoring: Scoring = self.mixer.scoring(slots[0].shape[2] - 1)
        return scoring

    def attend(self, q: Tensor, slots: Sequence[Any], visibility: Visibility) -> Tensor:
        """Return the heads' outputs [batch, heads, time, width]; q is as the score takes it."""
        return around((q, *slots[:2]), visibility, self.scoring(slots), self.mixer.impl, self.past.ring, lse=False).out

    def close(self, state: Any) -> Any:
        """Return the state after the chunk around its slots' ``state``."""
        return state


# Attention to the first tokens of a sequence, which outlive a window (Xiao et al. 2023, StreamingLLM, section 3.2).
#
# Token j < n is kept in slot j of ``Pinned``. A query at position t sees it here where it has left the window w, j <=
# t - w, and stands at min(t, n + w - 1), its rank in the cache. Attention within the window is merged by log-sum-exps.


def ranks(positions: Tensor, pinned: int, window: int) -> Tensor:
    """Return where queries at ``positions`` stand for the first tokens."""
    return positions.clamp_max(pinned + window - 1)


def attend_with_pinned(
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
        # The queries have different first tokens: each query becomes a row of the batch.
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
    ``seen`` [batch] counts the tokens of the carried sequence. Empty slots are zero."""
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


class PinnedReach(Reach):
    """A pattern that keeps the first tokens of a sequence: they are attended to apart from the window."""

    def __init__(self, mixer: Any, state: PinnedState, past: Past, x: Tensor) -> None:
        super().__init__(mixer, state, past, x)
        self.first = Pinned(state.first_keys, state.first_values)

    def project(self, q: Tensor, k: Tensor) -> None:
        self.far = self.mixer.position.rotate(q, k, ranks(self.past.positions, *self.mixer.pins))[0]

    def slots(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], None]:
        self.new = Pinned(k, v)
        return (k, v), None

    def attend(self, q: Tensor, slots: Sequence[Any], visibility: Visibility) -> Tensor:
        mixer, past, (count, window) = self.mixer, self.past, self.mixer.pins
        scoring = mixer.scoring(count + window - 1)._replace(sink=None)  # the window's attention has the sink
        new, first = (one._replace(v=mixer.values(one.v)) for one in (self.new, self.first))
        resets = past.chunk.reset is not None
        far = attend_with_pinned(
            mixer.score.queries(self.far), new, first, past.positions, window, resets, scoring, mixer.impl
        )
        near = attention(q, slots[0], slots[1], visibility, self.scoring(slots), impl=mixer.impl, lse=True)
        return merge(near, far).out

    def close(self, state: Any) -> PinnedState:
        first = renewed(self.first, self.new, self.past.chunk.valid, self.past.seen)
        return PinnedState(state, *first)  # type: ignore[call-arg]


def _rows(q: Tensor, positions: Tensor, slots: Tensor, window: int, time: int) -> tuple[Tensor, Visibility, Tensor]:
    """Return each query as a row [batch * time, heads, 1, head_dim], its visible slots, and the indices in the chunk
    [batch, time, slots] of the first tokens of its sequence; an index is negative for a token before the chunk."""
    start = torch.arange(time, device=q.device) - positions
    seen = slots <= positions[:, :, None] - window
    rows = q.transpose(1, 2).flatten(0, 1)[:, :, None]
    return rows, Visibility(attn_mask=seen.flatten(0, 1)[:, None, None]), start[:, :, None] + slots


def _gathered(old: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Return the first tokens [batch, n, heads, slots, width] of n sequences: the chunk's tokens at ``where`` [batch,
    n, slots], and the tokens of ``old`` where ``where`` is negative. Beyond the chunk, the tokens are arbitrary."""
    count = old.shape[2]
    slots = torch.arange(count, device=where.device)
    index = torch.where(where < 0, slots, count + where).clamp_max(count + tokens.shape[2] - 1)
    every = torch.cat([old.to(tokens.dtype), tokens], 2)
    picked = index.flatten(1)[:, None, :, None].expand(-1, every.shape[1], -1, every.shape[3])
    return every.gather(2, picked).unflatten(2, index.shape[1:]).transpose(1, 2)


# Tokens selected by their slots, and the pairs of selected queries and keys that a pattern allows.


def index_of(slots: Tensor, x: Tensor) -> Tensor:
    """Return ``slots`` as an index into ``x`` [batch, time, ...]; empty slots point anywhere in it."""
    return slots.clamp(0, x.shape[1] - 1)


def at_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Return x [batch, heads, time, head_dim] at ``slots`` [batch, n]."""
    index = slots.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def allowed_pairs(pattern: Pattern, q: Tensor, k: Tensor) -> Tensor:
    """Return which pairs the pattern allows, [batch, heads or 1, queries, keys]."""
    return torch.stack([pattern.at(head).allowed(q, k) for head in range(pattern.num_heads or 1)], 1)


# Attention of queries that look back over different distances: each has its span z in every head, and a soft mask.
#
#     out_i = sum_j m_ij exp(s_ij) v_j / sum_j m_ij exp(s_ij),    log m_ij as the span says of z_i and i - j
#
# A tile of queries meets the slots that its farthest-looking query sees in a head; heads of similar reach are computed
# together. Autograd saves a few numbers for each of these pairs. While a graph is captured, and on the meta device,
# every query is assumed to look back as far as allowed.

_ROWS = 64
_Call = tuple[Visibility, Scoring, AttentionImpl]


def attend_within_spans(
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


class SpanReach(Reach):
    """Each token looks back as far as it says itself; the cost of the spans adds up in the state."""

    def __init__(self, mixer: Any, state: SpanState, past: Past, x: Tensor) -> None:
        super().__init__(mixer, state, past, x)
        self.span: TokenSpan = mixer.span
        self.z, self.aux = self.span.of(x), state.aux

    def attend(self, q: Tensor, slots: Sequence[Any], visibility: Visibility) -> Tensor:
        k, v = slots
        return attend_within_spans(q, k, v, self.z, self.span, visibility, self.scoring(slots), self.mixer.impl)

    def close(self, state: Any) -> SpanState:
        cost = self.span.cost(self.z, self.past.chunk.valid)
        return SpanState(state, self.aux + cost.to(self.aux.dtype))  # type: ignore[call-arg]


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
    """Attend from ``queries`` of the heads ``members``, with spans of ``least`` tokens at least, to ``reach`` slots."""
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
        # Every tile is a call with indices from 0, so each needs another seed, or all tiles would drop alike.
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
    """Return the term that ``relative`` adds to the scores, [batch or 1, heads or 1, m, slots], of q [batch, heads, m,
    head_dim] and ``slots`` consecutive keys. The first key is ``farthest`` tokens before the last query."""
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
    # Row i has the distances of its keys from column time - 1 - i on: reading rows one shorter aligns them.
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
    """Return which of [batch, heads or 1, queries, slots] the pattern allows to ``positions`` [batch, queries]."""
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


# Softmax attention of one stretch of a row to the keys of the whole row; other processes have the other stretches.
#
# Keys and values of all stretches are gathered; the gradient is a reduce-scatter. Queries see both ways.


def of_stretch(qkv: Sequence[Tensor], row: Row, pattern: Pattern, scoring: Scoring, impl: AttentionImpl) -> Attended:
    """Return attention of q [batch, heads, time, head_dim] to the keys of the whole ``row`` that ``pattern`` allows."""
    q, k, v = qkv
    time = q.shape[2]
    begin = row.begin(time)
    end = begin + time
    k, v = row.crossing.row(torch.cat([k, v], dim=-1), 2).split([k.shape[-1], v.shape[-1]], dim=-1)
    padding = None if row.valid is None else ~row.valid
    places = torch.arange(k.shape[2], device=q.device).expand(len(q), -1)
    if pattern.band == (None, None):
        visibility = Visibility(key_padding_mask=padding)
        if scoring.relative is not None:
            visibility = visibility._replace(positions=places[:, begin:end], key_positions=places)
        return attention(q, k, v, visibility, scoring, impl=impl)
    first = 0 if pattern.behind is None else max(0, begin - max(0, pattern.behind))
    last = k.shape[2] if pattern.ahead is None else min(k.shape[2], end + max(0, pattern.ahead))
    # The last query stands at the last key: queries of nothing stand at those ahead.
    visibility = Visibility(
        pattern, positions=places[:, begin:last], key_padding_mask=None if padding is None else padding[:, first:last]
    )
    q, k, v = pad(q, (0, 0, 0, last - end)), k[:, :, first:last], v[:, :, first:last]
    return Attended(attention(q, k, v, visibility, scoring, impl=impl).out[:, :, :time])
