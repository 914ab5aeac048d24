"""Softmax attention whose state is a memory of tokens: hidden states of earlier segments (Transformer-XL), very many
keys and values behind a search (Memorizing), one vector of every token for its one head (SHA-RNN)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.attention_state import KeysValues, Past, ReservedKeysValues, ReservedSlots, TokenMemory
from kinformer.core.config import describe
from kinformer.core.contract import (
    AS_THEY_ARE,
    CausalMixer,
    Chunk,
    MixerConfig,
    RecomputesKV,
    activation_dtype,
    advance,
    in_blocks,
    newest,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.crossing import Crosses
from kinformer.core.parts import (
    Position,
    PositionConfig,
    ProjectionConfig,
    ResidualOutput,
    Score,
    ScoreConfig,
    check_forgetful,
    check_score,
    head_width,
    merge_heads,
)
from kinformer.core.pattern import Band, Pattern
from kinformer.core.probe import probe
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import (
    Attended,
    AttentionDropout,
    Needs,
    Scoring,
    Visibility,
    attention,
    check_impl,
    merge,
)
from kinformer.kernels.lookup import Evicted, Search, Store, StoreSizes, Subsequence, join
from kinformer.parts.patterns.sequence import Segments
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import TransformerXL
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.compiling import HostDriven, host_ints, uncompiled
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError

# Attention with a memory of earlier segments (Dai et al. 2019, Transformer-XL, section 3.2).
#
#     seg(i) = i // segment;   query i sees key j where segment * seg(i) - memory <= j <= i
#     k_j, v_j = W sg(h_j) where seg(j) < seg(i),  W h_j where seg(j) = seg(i)        (sg: no gradient)
#
# The memory holds the hidden states h as they enter the layer. The layer's norm, where it stands before the mixer, and
# the projections of the present weights make keys and values from the memory; they learn from memory and from the
# segment itself alike. Segments are counted by positions, so outputs and gradients are the same however the sequence is
# cut. Memory begins empty; evaluation may use another length than training. With ``same_length``, the authors' setting
# for evaluation, of the keys above query i sees the last ``memory``, i - memory < j <= i: all equally many.


class SegmentState(NamedTuple):
    """The state: ``hidden_states`` [batch, 1, past, dim] are the last ``memory + segment - 1`` inputs (``memory - 1``
    with ``same_length``), right-aligned; inputs of finished segments are cut from the graph. ``k``, ``v`` [batch,
    kv_heads, past, head_dim] are their projections without gradients; with gradients ``k`` and ``v`` are empty.
    ``seen`` [batch] int64."""

    hidden_states: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor

    slots = ("hidden_states", "k", "v")  # type: ignore[misc]
    derived = {"k": "hidden_states", "v": "hidden_states"}  # type: ignore[misc]

    def reserve(self, length: int) -> SegmentState | ReservedSlots:
        """Return a single-owner state with room for ``length`` more tokens; a
        state made with gradients stays a value."""
        return ReservedSlots.of(self, length) if self.k.shape[2] == self.hidden_states.shape[2] else self


class _Extent(NamedTuple):
    """The extent of a chunk, on the host. ``alone``: all queries of a row are of one segment. ``live``:
    how many past tokens the segment of a first query has at most; ``later``: how many of the chunk's
    tokens, from its first, may be memory."""

    alone: bool
    live: int
    later: int


class SegmentMemory(RecomputesKV, CausalMixer):
    """Softmax attention over a token's segment and the ``memory`` tokens before that; with ``same_length`` over the
    last ``memory`` tokens, its own counted.

    Shapes: x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads. Segments, memory and
    ``same_length`` change no weights.
    """

    growth = "window"

    class Config(MixerConfig):
        kind = "segment_memory"
        by_heads = True
        LEAST = {"segment": 1, "memory": 0}
        num_heads: int = 4
        head_dim: int | None = None
        segment: int = 128
        memory: int = 128
        same_length: bool = False
        projection: ProjectionConfig = MultiHead.Config(bias=False)
        position: PositionConfig = TransformerXL.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = False  # of the output projection
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.same_length and not self.memory:
                raise KinformerError(
                    "with same_length a token sees the last `memory` tokens, itself counted, but memory is 0; give 1 "
                    "or more, or leave same_length out."
                )
            check_impl(self.impl, Needs(band=False, lse=True), "segment_memory")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.head_dim = dim, config.head_dim or head_width(dim, config.num_heads)
        self.segment, self.memory = config.segment, config.memory
        self.projection = config.projection.build(dim, config.num_heads, self.head_dim)
        check_forgetful(self.projection, config.projection)
        self.position = config.position.build_heads(dim, config.num_heads, self.head_dim)
        self.score = config.score.build(config.num_heads, self.head_dim)
        check_score(config.score, self.score, self.position)
        whole = Segments(config.segment, config.memory)
        patterns: tuple[Pattern, ...] = (whole, Segments(config.segment, 0), replace(whole, same_segment=False))
        if config.same_length:
            patterns = tuple(pattern & Band(behind=config.memory - 1) for pattern in patterns)
        self.pattern, self.within_segment, self.older = patterns
        self.out = config.projection.build_output(dim, config.num_heads, self.head_dim, config.bias)
        self.dropout, self.impl = config.dropout, config.impl

    @property
    def retained(self) -> int:
        return self.pattern.behind or 0

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> SegmentState:
        hidden_states = torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype)
        empty = hidden_states.new_zeros(batch, self.projection.num_kv_heads, 0, self.head_dim)
        return SegmentState(hidden_states, empty, empty, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        width = self.dim + 2 * self.projection.num_kv_heads * self.head_dim
        return min(length, self.retained) * width * dtype.itemsize + 8

    def forward(
        self, chunk: Chunk, state: SegmentState | ReservedSlots, norm: nn.Module = AS_THEY_ARE
    ) -> tuple[Tensor, SegmentState | ReservedSlots]:
        if isinstance(state, SegmentState):
            return self._absorb(chunk, state, norm)
        if chunk.valid is None and chunk.reset is None:
            return self._extend(chunk, state, norm)
        room = state.room
        y, value = self._absorb(chunk, state.release(), norm)
        return y, value.reserve(room)

    def _absorb(self, chunk: Chunk, state: SegmentState, norm: nn.Module) -> tuple[Tensor, SegmentState]:
        positions = positions_of(chunk, state.seen)
        seen = advance(state.seen, chunk, positions)
        chunk = chunk._replace(x=select_valid(chunk.x, chunk.valid))
        q, k, v = self.projection(norm(chunk.x))
        q, k = self.position.rotate(q, k, positions)
        v = probe("values", self.position.values(v))
        hidden_states = torch.cat([state.hidden_states, chunk.x[:, None].to(state.hidden_states.dtype)], dim=2)
        if torch.is_grad_enabled():
            y = self._learn(chunk, state, (q, k, v), positions, norm)
            k, v = state.k[:, :, :0].detach(), state.v[:, :, :0].detach()
        else:
            k, v = (torch.cat(both, dim=2) for both in zip(self._past(state, k, norm), (k, v), strict=True))
            y = self._attend(q, k, v, self.pattern, positions).out
            k, v = (newest(chunk, slots, seen, self.retained) for slots in (k, v))
        hidden_states = self._settled(newest(chunk, hidden_states, seen, self.retained), seen)
        y = select_valid(self.out(probe("outputs", merge_heads(y))), chunk.valid)
        return y, SegmentState(hidden_states, k, v, seen)  # type: ignore[call-arg]

    def _extend(self, chunk: Chunk, state: ReservedSlots, norm: nn.Module) -> tuple[Tensor, ReservedSlots]:
        positions = state.positions(chunk)
        q, k, v = self.projection(norm(chunk.x))
        q, k = self.position.rotate(q, k, positions)
        new = chunk.x[:, None].to(k.dtype), k, self.position.values(v)
        (_, k, v), state, _ = state.extend(new, self.retained)
        return self.out(merge_heads(self._attend(q, k, v, self.pattern, positions).out)), state

    def _past(self, state: SegmentState, like: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return keys and values of the past without gradients: from the state, or projected from its hidden states."""
        missing = state.hidden_states.shape[2] - state.k.shape[2]
        if not missing:
            return state.k.to(like.dtype), state.v.to(like.dtype)
        return self._keys_values(state.hidden_states, _before(state.seen, state.hidden_states.shape[2]), norm)

    def _learn(
        self, chunk: Chunk, state: SegmentState, qkv: tuple[Tensor, Tensor, Tensor], positions: Tensor, norm: nn.Module
    ) -> Tensor:
        """Attend with gradients. Where a row's queries are of one segment, every key is either live or memory; else
        some are both, and attention to the own segments and to their memories are two calls, merged."""
        q, k, v = qkv
        past, time = state.hidden_states.shape[2], chunk.x.shape[1]
        extent = self._extent(positions, chunk.reset is not None, past)
        recent = state.hidden_states[:, :, past - min(past, self.memory + extent.live) :]
        if extent.alone:
            if recent.shape[2]:
                recent = _cut(recent, state.seen % self.segment, extent.live)
                older = self._keys_values(recent, _before(state.seen, recent.shape[2]), norm)
                k, v = (torch.cat(both, dim=2) for both in zip(older, (k, v), strict=True))
            return self._attend(q, k, v, self.pattern, positions).out
        if extent.live:
            older_positions = _before(state.seen, extent.live)
            older = self._keys_values(state.hidden_states[:, :, past - extent.live :], older_positions, norm)
            k, v = (torch.cat(both, dim=2) for both in zip(older, (k, v), strict=True))
        present_segment = self._attend(q, k, v, self.within_segment, positions, lse=self.memory > 0)
        if not self.memory:
            return present_segment.out
        # sg(h_j) for seg(j) < seg(i), with projections that learn: detach inputs, not keys.
        memory = torch.cat([recent, chunk.x[:, None, : extent.later].to(recent.dtype)], dim=2).detach()
        older_positions = torch.cat([_before(state.seen, recent.shape[2]), positions[:, : extent.later]], dim=1)
        k, v = self._keys_values(memory, older_positions, norm)
        k, v = (pad(x, (0, 0, 0, time - extent.later)) for x in (k, v))
        return merge(present_segment, self._attend(q, k, v, self.older, positions, lse=True)).out

    def _extent(self, positions: Tensor, resets: bool, past: int) -> _Extent:
        time = positions.shape[1]
        first = host_ints(positions[:, 0], past)
        if first is None:
            return _Extent(False, min(past, self.segment - 1), time)
        live = min(past, max(position % self.segment for position in first))
        if resets:
            return _Extent(False, live, time)
        later = max((position + time - 1) // self.segment * self.segment - position for position in first)
        return _Extent(later <= 0, live, max(later, 0))

    def _keys_values(self, hidden_states: Tensor, positions: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``hidden_states`` [batch, 1, slots, dim] at ``positions`` [batch, slots]."""
        k, v = self.projection.keys_values(norm(hidden_states[:, 0].to(self.out.weight.dtype)))  # type: ignore[arg-type]
        return self.position.rotate_keys(k, positions), self.position.values(v)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, positions: Tensor, lse: bool = False
    ) -> Attended:
        relative = self.position.relative(0, min(k.shape[2] - 1, self.retained))
        scoring = Scoring.of(self.score, relative, AttentionDropout.drawn(self.dropout, self.training))
        visibility = Visibility(pattern, positions)
        if pattern is self.older:  # a sink counts once, beside the present segment
            scoring = scoring._replace(sink=None)
        return attention(self.score.queries(q), k, v, visibility, scoring, impl=self.impl, lse=lse)

    def _settled(self, hidden_states: Tensor, seen: Tensor) -> Tensor:
        """Return the slots of a state, with finished segments cut from the graph."""
        if not hidden_states.requires_grad:
            return hidden_states
        counts = host_ints(seen, hidden_states.shape[2])
        longest = self.segment - 1 if counts is None else max(count % self.segment for count in counts)
        return _cut(hidden_states, seen % self.segment, min(longest, hidden_states.shape[2]))


def _before(seen: Tensor, slots: int) -> Tensor:
    """Return the positions [batch, slots] of the last tokens before ``seen`` [batch]."""
    return seen[:, None] + torch.arange(-slots, 0, device=seen.device)


def _cut(slots: Tensor, live: Tensor, limit: int) -> Tensor:
    """Return ``slots`` [batch, 1, past, dim] with a graph to the last ``live`` [batch] of each row alone; ``live`` is
    at most ``limit``."""
    old, new = slots[:, :, : slots.shape[2] - limit].detach(), slots[:, :, slots.shape[2] - limit :]
    age = torch.arange(limit, 0, -1, device=live.device)
    inside = (age <= live[:, None])[:, None, :, None]
    return torch.cat([old, torch.where(inside, new, new.detach())], dim=2)


# Memorizing attention (Wu et al. 2022): a window, and a search among very many memories of the same sequence.
#
#     y = (1 - g) local + g external,   g = sigmoid(gate) per head,   then an output projection
#     local     softmax(|scale| q . k) v over the last ``window`` tokens
#     external  softmax(|scale| q . k) v over the ``topk`` memories that a search by q returns of earlier segments
#
# q and k are normalised, q / sqrt(q . q + 1e-6), v is not. A query of segment i // segment may find the ``memory_size``
# positions before its segment. Memories take no gradient, queries do. Before there are memories the external part is 0,
# but has its share g, as in the authors' code. A ``position`` adds to the scores of the window alone, by distance (the
# paper: T5's biases); memories have none.


_BLOCKS = 16
"""How many times the memory is copied while it fills: tokens leave the window in this many blocks."""


class MemorizingState(NamedTuple):
    """The state: ``k``, ``v`` [batch, heads, memories, head_dim] of evicted tokens, right-aligned and without a graph,
    up to the last multiple of the mixer's ``batch_of``; ``recent`` holds later tokens and the window, with their
    graph."""

    recent: KeysValues | ReservedKeysValues
    k: Tensor
    v: Tensor

    slots = ("k", "v")  # type: ignore[misc]


class Memorizing(HostDriven, Crosses, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    ``search``: how memories are searched, see ``kernels.lookup``; "bucketed" is the authors'. ``sees_itself``: whether
    a token is in its own window (in the authors' code it is not). ``memory_size`` = 0 leaves the window alone; it, the
    search and ``topk`` change no weights. ``torch.compile`` leaves the look-up outside of the graph, since it needs
    positions on the host.
    """

    growth = "window"
    crosses = False

    class Config(MixerConfig):
        kind = "memorizing"
        LEAST = {"window": 1, "segment": 1, "memory_size": 0, "topk": 1}
        by_heads = True
        retired = {"lists": 64, "probes": 3}
        num_heads: int = 4
        head_dim: int | None = None
        window: int = 512
        segment: int = 512
        memory_size: int = 8192
        topk: int = 32
        search: Literal["bucketed", "exact"] = "bucketed"
        sees_itself: bool = True
        position: PositionConfig = NoPosition.Config()  # of the window
        bias: bool = False
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.memory_size % self.segment:
                raise KinformerError(
                    f"memory_size = {self.memory_size} is not a multiple of segment = {self.segment}; whole segments "
                    "are remembered, so give a multiple."
                )
            if self.search == "bucketed" and self.segment % self.topk:
                raise KinformerError(
                    f"topk = {self.topk} does not divide segment = {self.segment}, which the bucketed search needs; "
                    "choose a divisor, or the search exact."
                )

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        self.num_heads, self.head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        width = self.num_heads * self.head_dim
        self.qkv = in_blocks(nn.Linear(dim, 3 * width, bias=config.bias), width, width, width)
        self.scale = nn.Parameter(torch.ones(config.num_heads))
        self.gate = nn.Parameter(torch.zeros(config.num_heads))
        self.out = ResidualOutput(width, dim, bias=config.bias)
        back = config.window - 1 if config.sees_itself else config.window
        self.pattern = Band(behind=back, ahead=0 if config.sees_itself else -1)
        self.position = config.position.build_heads(dim, config.num_heads, self.head_dim)
        _check_position(config.position, self.position)
        needs = Needs.of_parts(self.pattern, Score(), self.position)
        check_impl(config.impl, needs._replace(memories=config.memory_size > 0), "memorizing")
        self.batch_of = config.segment * max(1, config.memory_size // config.segment // _BLOCKS)
        """How many memories are evicted at a time, counted by positions."""
        self.most_past = max(back, self.batch_of - 1) if config.memory_size else back
        self.rules = StoreSizes(config.segment, config.memory_size, self.batch_of)

    @property
    def host_reads(self) -> str:
        return "it evicts and searches memories" if self.config.memory_size else ""

    @property
    def retained(self) -> int:
        size = self.config.memory_size
        return max(self.most_past, size + self.batch_of if size else 0)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> MemorizingState:
        empty = torch.zeros(batch, self.num_heads, 0, self.head_dim, device=device, dtype=dtype)
        recent = KeysValues(empty, empty, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]
        return MemorizingState(recent, empty, empty)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        evicted = min(length // self.batch_of * self.batch_of, self.config.memory_size)
        slots = min(length, self.most_past) + evicted
        return 2 * self.num_heads * slots * self.head_dim * dtype.itemsize + 8

    def forward(self, chunk: Chunk, state: MemorizingState) -> tuple[Tensor, MemorizingState]:
        past = Past(chunk, state.recent, self)
        before = past.positions[:, 0] if past.reserved else past.state.seen
        q, k, v = self._project(select_valid(chunk.x, chunk.valid))
        (k, v), whole, recent = past.remember((k, v), self.most_past)
        # The recent past is longer than the window while memories wait for their eviction.
        count = k.shape[2] if past.reserved else q.shape[2] + (self.pattern.behind or 0)
        y = self._local(q, _last(k, count), _last(v, count), past.positions, whole)
        external, evicted = self._external(chunk, q, k, v, before, state)
        return select_valid(self._mix(y, external), chunk.valid), MemorizingState(recent, *evicted)  # type: ignore[call-arg]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries and keys, and values [batch, heads, time, head_dim]."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        wide = (tensor.to(state_dtype(v.dtype)) for tensor in (q, k))
        q, k = (tensor * (tensor.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for tensor in wide)
        lacking = "The window's probabilities and the memories' are mixed by the gate of their head."
        return q.to(v.dtype), k.to(v.dtype), probe("values", v, lacking=lacking)

    def _scaled(self, q: Tensor) -> Tensor:
        return q * self.scale.abs()[:, None, None].to(q.dtype)

    def _local(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, whole: bool) -> Tensor:
        visibility = Visibility(self.pattern, positions, whole)
        farthest = min(k.shape[2] - 1, self.pattern.behind or 0)
        scoring = Scoring(1.0, relative=self.position.relative(0, farthest))
        return attention(self._scaled(q), k, v, visibility, scoring, impl=self.config.impl).out

    def _mix(self, local: Tensor, external: Tensor | None) -> Tensor:
        """Join both parts by the gate and project them; ``external`` None: the mixer has no memories, and the local
        part has the whole weight."""
        gate = self.gate.sigmoid()[:, None, None].to(local.dtype)
        # (1 - g) local + g external; 0 * gate gives engines a gradient of every parameter.
        y = local + 0.0 * gate if external is None else torch.lerp(local, external.to(local.dtype), gate)
        return self.out(probe("outputs", merge_heads(y)))

    @uncompiled("memories are searched and evicted by the host")
    def _external(
        self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, before: Tensor, state: MemorizingState
    ) -> tuple[Tensor | None, Evicted]:
        """Return the external part [batch, heads, time, head_dim], and the evicted memories after the chunk.

        k, v: of the recent past and of the chunk; ``before`` [batch] counts the tokens that each row's sequence had.
        """
        old = Evicted(*(item.detach() for item in state[1:]))
        if not self.config.memory_size:
            return None, old
        seen = host_ints(before, 0)
        assert seen is not None
        impl = self.config.impl
        assert impl != "sdpa" and impl != "flex" and impl != "triton"  # refused when it was built
        search = Search(self.config.search, self.config.topk, impl)
        outputs, after = [], []
        for rows, runs in self._runs(chunk, seen):
            fresh = (k[rows].detach(), v[rows].detach())
            evicted = Evicted(*(item[rows] for item in old))
            store = Store(self.rules, search, evicted, seen[rows.start], fresh, chunk.x.shape[1])
            outputs.append(store.absorb(q[rows], self._scaled(q[rows]), runs))
            after.append(store.evicted)
        return join(outputs), Evicted(*(join(list(item)) for item in zip(*after, strict=True)))

    def _runs(self, chunk: Chunk, seen: list[int]) -> Iterator[tuple[slice, list[Subsequence]]]:
        """Yield rows with the same subsequences of the chunk (all rows, or one by one), and these subsequences."""
        batch, time = chunk.x.shape[:2]
        reset = real_resets(chunk)
        if chunk.valid is None and reset is None and len(set(seen)) == 1:
            yield slice(0, batch), [Subsequence(0, time, seen[0], True)]
            return
        counts = [time] * batch if chunk.valid is None else host_ints(chunk.valid.sum(dim=1), time)
        for row, (count, position) in enumerate(zip(counts or (), seen, strict=True)):
            begins = [] if reset is None else reset[row].nonzero()[:, 0].tolist()
            runs = [
                Subsequence(begin, end, 0 if index else position, not index)
                for index, (begin, end) in enumerate(zip([0, *begins], [*begins, count], strict=True))
                if begin < end
            ]
            yield slice(row, row + 1), runs


def _check_position(config: PositionConfig, position: Position) -> None:
    """Refuse a position that changes queries, keys or values, which the search has in common with the window."""
    changes = position.overrides("rotate", "rotate_keys", "values")
    if (relative := position.relative(0, 1)) is not None:
        changes |= any(table is not None for table in (relative.factor, relative.keys, relative.values))
    if changes:
        raise KinformerError(
            f"{describe(config)} changes more than the scores of the window, but memories are looked up with the same "
            "queries and keys, without positions; give none, or one that adds to scores by distance (t5, alibi)."
        )


def _last(slots: Tensor, count: int) -> Tensor:
    """Return the last ``count`` slots, or as many as there are."""
    # A branch, since Inductor lacks kernels for sizes that hold a maximum.
    start = slots.shape[2] - count if slots.shape[2] > count else 0
    return slots[:, :, start:]


class SingleHead(TokenMemory):
    """Single-headed attention without projections of keys and values (Merity 2019, SHA-RNN, section 3.2).

        h, m = norm(x), norm'(x)           keys and values are m itself, of the last ``memory`` tokens
        q = norm''(W h + b) * sigmoid(q_gate),   k = m * sigmoid(k_gate),   v = m * sigmoid(f) * tanh(c)
        y = h + softmax(q k^T / sqrt(dim)) v,    [c, f] = W' sigmoid(v_gate) + b'

    norm, norm' and norm'' are ``input_norm``, ``memory_norm`` and ``query_norm``; W is ``query``, W' and b' are
    ``value``, c ``content`` and f ``strength``. Gates are vectors that no input changes, so they are taken out of
    the sums: only m is remembered, once. The sum with h is the residual one of the paper, whose stream is normed
    before the sum.

    The mixer x [batch, time, dim] -> y [batch, time, dim], the residual sum included; a query sees ``memory``
    tokens, its own being the last. ``dropout`` falls on the output of attention.
    """

    growth = "window"

    class Config(MixerConfig):
        kind = "single_head"
        indivisible = "it has one head"
        LEAST = {"memory": 1}
        memory: int = 1024
        dropout: float = 0.0
        eps: float = 1e-12
        impl: AttentionImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.width, self.impl = dim, dim, config.impl
        self.pattern = Band(behind=config.memory - 1)
        check_impl(config.impl, Needs(), "single_head")
        self.input_norm, self.memory_norm, self.query_norm = (nn.LayerNorm(dim, eps=config.eps) for _ in range(3))
        self.query = nn.Linear(dim, dim)
        self.q_gate, self.k_gate, self.v_gate = (nn.Parameter(torch.zeros(dim)) for _ in range(3))
        self.value = nn.Linear(dim, 2 * dim)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def like(self) -> Tensor:
        return self.q_gate

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the queries, and the new memory [batch, 1, time, dim]."""
        return self.input_norm(x), self.memory_norm(x)[:, None].to(activation_dtype(self.q_gate))

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        # (q * g_q) . (m * g_k) = (q * g_q * g_k) . m: the key's gate moves to the query, so m is stored once.
        q = self.query_norm(self.query(h)) * (self.q_gate.sigmoid() * self.k_gate.sigmoid())
        q, visibility = q[:, None].to(slots.dtype), Visibility(self.pattern, positions, whole)
        y = attention(q, slots, probe("values", slots), visibility, Scoring(self.dim**-0.5), impl=self.impl).out
        mixed = probe("outputs", y)[:, 0]
        content, strength = self.value(self.v_gate.sigmoid()[None])[0].chunk(2, dim=-1)
        # v = m * sigmoid(f) * tanh(c) is linear in m, so the gate moves out of the sum over keys.
        added = mixed * (strength.sigmoid() * content.tanh())
        return h + (added if self.dropout is None else self.dropout(added)).to(h.dtype)


PARTS = {
    "SegmentMemoryAttention": SegmentMemory.Config,
    "MemorizingAttention": Memorizing.Config,
    "SingleHeadAttention": SingleHead.Config,
}
