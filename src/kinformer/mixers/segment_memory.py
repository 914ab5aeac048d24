"""Attention with a memory of earlier segments (Dai et al. 2019, Transformer-XL, section 3.2).

    seg(i) = i // segment;   query i sees key j where segment * seg(i) - memory <= j <= i
    k_j, v_j = W sg(h_j) where seg(j) < seg(i),  W h_j where seg(j) = seg(i)        (sg: no gradient)

The memory holds the hidden states h as they enter the layer. The layer's norm, where it stands before the mixer, and
the projections of the present weights make keys and values from the memory; they learn from memory and from the segment
itself alike. Segments are counted by positions, so outputs and gradients are the same however the sequence is cut.
Memory begins empty; evaluation may use another length than training. With ``same_length``, the authors' setting for
evaluation, of the keys above query i sees the last ``memory`` alone, i - memory < j <= i: each query equally many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.attention_state import ReservedSlots
from kinformer.core.contract import (
    AS_THEY_ARE,
    CausalMixer,
    Chunk,
    MixerConfig,
    RecomputesKV,
    advance,
    newest,
    positions_of,
    select_valid,
)
from kinformer.core.parts import (
    PositionConfig,
    ProjectionConfig,
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
from kinformer.parts.patterns.sequence import Segments
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import TransformerXL
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import host_ints


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

    @dataclass(frozen=True, kw_only=True)
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


PARTS = {"SegmentMemoryAttention": SegmentMemory.Config}
