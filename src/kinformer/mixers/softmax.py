"""Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).

    y = softmax(scale * rotate(q) rotate(k)^T over the keys that the pattern allows) v,  then an output projection

(Vaswani et al. 2017, equation 1). The state holds the keys and values that a later query can still see, right-aligned:
a difference of slots is a difference of positions for every row, and ``seen`` says how many slots of a row are valid.
With a learnt ``span`` the pattern, and with it the state, is cut to what the heads look at as the weights are now.
Where each token has spans of its own, their cost adds up in the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    PartialOutput,
    activation_dtype,
    advance,
    newest,
    positions_of,
    select_valid,
    state_dtype,
)
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ProjectionConfig,
    Relative,
    ScoreConfig,
    check_heads,
    check_score,
    head_width,
    merge_heads,
)
from kinformer.core.pattern import Pattern
from kinformer.core.reserved import KeysValues, ReservedKeysValues
from kinformer.core.span import SpanConfig, TokenSpan
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl, spans
from kinformer.kernels.impls import AttentionImpl
from kinformer.patterns.causal import Causal
from kinformer.patterns.spanned import spanned
from kinformer.positions.none import NoPosition
from kinformer.projections.multi_head import MultiHead
from kinformer.projections.output_gate import Gate, build_gate
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import is_empty_mask
from kinformer.scores.scaled_dot import ScaledDot


class ContextState(NamedTuple):
    """The state of attention whose projection has a context; ``recent`` [batch, heads, up to context, head_dim] are the
    projections of the last tokens, right-aligned."""

    attention: KeysValues | ReservedKeysValues
    recent: Tensor

    slots = ("recent",)  # type: ignore[misc]


Slots = KeysValues | ReservedKeysValues | ContextState


class SpanState(NamedTuple):
    """The state ``attention`` of tokens with spans of their own, and ``aux`` [batch], the cost of the spans."""

    attention: Slots
    aux: Tensor

    aux_name = "span"  # type: ignore[misc]


State = Slots | SpanState


class SoftmaxAttention(PartialOutput, CausalMixer):
    """Multi-head attention over the chunk and the remembered past.

    Shapes: x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "softmax"
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = MultiHead.Config()
        position: PositionConfig = NoPosition.Config()
        pattern: PatternConfig = Causal.Config()
        score: ScoreConfig = ScaledDot.Config()
        span: SpanConfig | None = None
        gate: Gate = "none"  # of the heads' outputs
        bias: bool = True  # of the output projection
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def build(self, dim: int) -> SoftmaxAttention:
            return SoftmaxAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.projection = config.projection.build(dim, config.num_heads, head_dim)
        self.position = config.position.build_heads(dim, config.num_heads, head_dim)
        self.score = config.score.build(config.num_heads, head_dim)
        self.whole_pattern = config.pattern.build()
        if self.whole_pattern.ahead != 0:
            raise KinformerError(
                f"the pattern {config.pattern.kind!r} lets a token see later ones, which a decoder must not; "
                "use a causal pattern (causal, local)."
            )
        check_heads(config.pattern, self.whole_pattern, config.num_heads)
        cut = partial(spanned, self.whole_pattern)
        self.span = None if config.span is None else config.span.build(dim, config.num_heads, cut)
        check_score(config.score, self.score, self.position)
        self.dim, self.head_dim, self.dropout, self.impl = dim, head_dim, config.dropout, config.impl
        check_impl(config.impl, self._needs(), "softmax")
        self.gate = build_gate(config.gate, dim, config.num_heads, head_dim)
        self.out = config.projection.build_output(dim, config.num_heads, head_dim, config.bias)
        self.projected_heads = config.num_heads + 2 * self.projection.num_kv_heads
        self.growth = "linear" if self.pattern.horizon is None else "window"

    @property
    def pattern(self) -> Pattern:
        """Return the pattern; with a span, as its weights are now."""
        return self.whole_pattern if self.span is None else self.span.pattern

    def _needs(self) -> Needs:
        needs = Needs.of_parts(self.pattern, self.score, self.position, self.dropout)
        if isinstance(self.span, TokenSpan):
            return needs._replace(pairs=True)
        return needs if self.span is None else needs._replace(tables=(*needs.tables, "bias"))

    @property
    def retained(self) -> int | None:
        horizon = self.pattern.horizon
        return None if horizon is None else max(horizon, self.projection.context)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        like: Tensor = self.out.weight  # type: ignore[assignment]
        device = device or like.device
        dtype = dtype or activation_dtype(like)
        empty = torch.zeros(batch, self.projection.num_kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        state: Any = KeysValues(empty, empty, seen)  # type: ignore[call-arg]
        if self.projection.context:
            state = ContextState(state, empty.new_zeros(batch, self.projected_heads, 0, self.head_dim))  # type: ignore[call-arg]
        if isinstance(self.span, TokenSpan):
            state = SpanState(state, torch.zeros(batch, device=device, dtype=state_dtype(dtype)))  # type: ignore[call-arg]
        return state

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        past = length if self.pattern.horizon is None else min(length, self.pattern.horizon)
        slots = 2 * self.projection.num_kv_heads * past + self.projected_heads * min(length, self.projection.context)
        aux = state_dtype(dtype).itemsize if isinstance(self.span, TokenSpan) else 0
        return slots * self.head_dim * dtype.itemsize + 8 + aux

    def forward(self, chunk: Chunk, state: State, output_mask: Tensor | None = None) -> tuple[Tensor, State]:
        if not isinstance(state, SpanState):
            return self._step(chunk, state, output_mask)
        assert isinstance(self.span, TokenSpan)
        z = self.span.of(select_valid(chunk.x, chunk.valid))
        y, after = self._step(chunk, state.attention, output_mask, z)
        return y, SpanState(after, state.aux + self.span.cost(z, chunk.valid).to(state.aux.dtype))  # type: ignore[call-arg]

    def _step(
        self, chunk: Chunk, state: Slots, output_mask: Tensor | None, z: Tensor | None = None
    ) -> tuple[Tensor, Slots]:
        """Absorb a chunk; ``z`` [batch, heads, time] are the spans of the tokens, where each has its own."""
        attention, recent = state if isinstance(state, ContextState) else (state, None)  # type: ignore[misc]
        if isinstance(attention, KeysValues):
            y, attention, recent = self._absorb(chunk, attention, recent, output_mask, z)
        elif chunk.valid is None and chunk.reset is None:
            y, attention, recent = self._extend(chunk, attention, recent, output_mask, z)
        else:
            room = attention.room
            y, value, recent = self._absorb(chunk, attention.release(), recent, output_mask, z)
            attention = value.reserve(room)
        return y, attention if recent is None else ContextState(attention, recent)  # type: ignore[call-arg]

    def _absorb(
        self, chunk: Chunk, state: KeysValues, recent: Tensor | None, output_mask: Tensor | None, z: Tensor | None
    ) -> tuple[Tensor, KeysValues, Tensor | None]:
        positions = positions_of(chunk, state.seen)
        seen = advance(state.seen, chunk, positions)
        q, k, v, recent = self._project(chunk, positions, seen, recent, output_mask)
        past = state.k.shape[2]
        if past:
            k, v = torch.cat([state.k.to(k.dtype), k], dim=2), torch.cat([state.v.to(v.dtype), v], dim=2)
        y = self._attend((q, k, v), chunk, positions, not past and chunk.reset is None, output_mask, z)
        k, v = (newest(chunk, slots, seen, self.pattern.horizon) for slots in (k, v))
        return select_valid(y, chunk.valid), KeysValues(k, v, seen), recent  # type: ignore[call-arg]

    def _extend(
        self,
        chunk: Chunk,
        state: ReservedKeysValues,
        recent: Tensor | None,
        output_mask: Tensor | None,
        z: Tensor | None,
    ) -> tuple[Tensor, ReservedKeysValues, Tensor | None]:
        positions = state.positions(chunk)
        q, k, v, recent = self._project(chunk, positions, positions[:, -1] + 1, recent, output_mask)
        k, v, state, full = state.append(k, v, self.pattern.horizon)
        return self._attend((q, k, v), chunk, positions, full, output_mask, z), state, recent

    def _project(
        self, chunk: Chunk, positions: Tensor, seen: Tensor, recent: Tensor | None, output_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Return q (None where the output mask is empty), k and v of the chunk, turned by position, and the projections
        that later tokens need where the projection has a context."""
        x = select_valid(chunk.x, chunk.valid)
        # No output is needed: the keys and values are absorbed without queries.
        if recent is None and output_mask is not None and is_empty_mask(output_mask):
            k, v = self.projection.keys_values(x)
            return None, self.position.rotate_keys(k, positions), self.position.values(v), None
        q, k, v = self.projection(x)
        if recent is not None:
            batch, heads, past, head_dim = recent.shape
            nothing = q.new_zeros(batch, heads, self.projection.context - past, head_dim)
            tokens = torch.cat([nothing, recent.to(q.dtype), torch.cat([q, k, v], dim=1)], dim=2)
            q, k, v = self.projection.combine(tokens, None if chunk.reset is None else positions)
            recent = newest(chunk, tokens, seen, min(self.projection.context, past + q.shape[2]))
        q, k = self.position.rotate(q, k, positions)
        return q, k, self.position.values(v), recent

    def _attend(
        self,
        qkv: tuple[Tensor | None, Tensor, Tensor],
        chunk: Chunk,
        positions: Tensor,
        whole: bool,
        output_mask: Tensor | None,
        z: Tensor | None,
    ) -> Tensor:
        """Attend and project; ``whole``: every slot belongs to the sequence of every query of its row."""
        q, k, v = qkv
        if q is None or (output_mask is not None and not output_mask.numel()):
            return v.new_zeros(*positions.shape, self.dim)
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        scoring = Scoring.of(self.score, self._relative(k.shape[2] - 1), dropout)
        visibility = Visibility(self.pattern, positions, whole)
        q = self.score.queries(q)
        if isinstance(self.span, TokenSpan):
            assert z is not None
            y = spans.attend(q, k, v, z, self.span, visibility, scoring, self.impl)
        else:
            y = attention(q, k, v, visibility, scoring, impl=self.impl).out
        heads = merge_heads(y)
        x = None if self.gate is None else select_valid(chunk.x, chunk.valid)
        if output_mask is not None:
            heads, x = heads[output_mask], None if x is None else x[output_mask]
        y = self.out(heads if self.gate is None else self.gate(heads, x))
        if output_mask is None:
            return y
        return y.new_zeros(*positions.shape, self.dim).index_put((output_mask,), y)

    def _relative(self, farthest: int) -> Relative | None:
        if self.span is None:
            return self.position.relative(0, farthest)
        farthest = min(farthest, max(self.span.windows))
        if isinstance(self.span, TokenSpan):
            return self.position.relative(1, farthest) if farthest > 0 else None
        return self.span.joined(self.position.relative(1, farthest), farthest)
