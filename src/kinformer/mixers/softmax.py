"""Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).

    y = softmax(scale * rotate(q) rotate(k)^T over the keys that the pattern allows) v,  then an output projection

(Vaswani et al. 2017, equation 1). The state holds the keys and values that a later query can still see, right-aligned:
a difference of slots is a difference of positions for every row, and ``seen`` says how many slots of a row are valid.
With a learnt ``span`` the pattern, and with it the state, is cut to what the heads look at as the weights are now.
Where each token has spans of its own, their cost adds up in the state. Where the pattern pins the first tokens, the
state holds these too, and attention to them is merged with that to the others. A ``decay`` by head lowers scores by
what lies between query and key (``parts.decays``), and the state holds its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kinformer.core.attention_state import (
    AttentionCall,
    Cache,
    CacheShape,
    CacheState,
    ContextState,
    NewTokens,
    Pinned,
    PinnedState,
    Slots,
    SpanState,
    is_int8,
)
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
)
from kinformer.core.crossing import Crosses
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ProjectionConfig,
    ScoreConfig,
    check_causal,
    check_heads,
    check_score,
    check_unpinned,
    head_width,
    merge_heads,
)
from kinformer.core.pattern import Pattern
from kinformer.core.probe import probe
from kinformer.core.reserved import DecayedKeysValues, KeysValues, ReservedSlots
from kinformer.core.span import SpanConfig, TokenSpan, relative_of
from kinformer.kernels.attention import Attended, AttentionDropout, Needs, Scoring, Visibility, check_impl, merge, spans
from kinformer.kernels.attention.ring import around
from kinformer.kernels.attention.spans import attend_with_pinned, ranks, renewed
from kinformer.kernels.impls import AttentionImpl
from kinformer.parts.decays import DecayConfig, build_score_decay, sums_of
from kinformer.parts.output_parts import (
    Exclusive,
    Gate,
    OutputNormKind,
    ValueResidual,
    build_differential,
    build_gate,
    build_norm,
    written,
)
from kinformer.parts.patterns.sequence import Causal, spanned
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import MultiHead
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.host import is_empty_mask


class SoftmaxAttention(Crosses, PartialOutput, CausalMixer):
    """Multi-head attention over the chunk and the remembered past: x [batch, time, dim] -> y [batch, time, dim].
    ``head_dim`` defaults to dim / num_heads."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "softmax"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = MultiHead.Config()
        position: PositionConfig = NoPosition.Config()
        pattern: PatternConfig = Causal.Config()
        score: ScoreConfig = ScaledDot.Config()
        cache: Literal["full", "int8"] = "full"  # of the past's keys and values
        span: SpanConfig | None = None
        decay: DecayConfig | None = None  # of scores
        gate: Gate = "none"  # of the heads' outputs
        head_norm: OutputNormKind = "none"  # of the heads' outputs, before the gate
        value_residual: bool = False
        exclusive: bool = False  # outputs without what points along the token's own value
        differential: float | None = None  # lam_init of differential attention
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
        check_causal(config.pattern, self.whole_pattern)
        check_heads(config.pattern, self.whole_pattern, config.num_heads)
        cut = partial(spanned, self.whole_pattern)
        self.span = None if config.span is None else config.span.build(dim, config.num_heads, cut)
        if self.span is not None:
            check_unpinned(config.pattern, self.whole_pattern)
        self.pins = self.whole_pattern.pinned, (self.whole_pattern.recent.behind or 0) + 1
        check_score(config.score, self.score, self.position)
        pinned, by_token = self.pins[0], isinstance(self.span, TokenSpan)
        self.decay = build_score_decay(config, dim, head_dim, self.score, self.position, pinned > 0 or by_token)
        self.dim, self.head_dim, self.dropout, self.impl = dim, head_dim, config.dropout, config.impl
        check_impl(config.impl, needs := self._needs(), "softmax")
        kv_heads = self.projection.num_kv_heads
        self.value_residual = ValueResidual(kv_heads, head_dim) if config.value_residual else None
        self.differential = build_differential(config.differential, config.num_heads, kv_heads, head_dim, self.position)
        self.exclusive = Exclusive(config.num_heads) if config.exclusive else None
        self.gate = build_gate(config.gate, dim, config.num_heads, head_dim)
        self.head_norm = build_norm(config.head_norm, config.num_heads, head_dim)
        self.out = config.projection.build_output(dim, config.num_heads, head_dim, config.bias)
        sizes, narrow = (config.num_heads, kv_heads, head_dim, self.projection.context), is_int8(config.cache)
        self.shape = CacheShape(*sizes, pinned, by_token, self.decay is not None, narrow)
        self.growth = "linear" if self.pattern.horizon is None else "window"
        self.crosses = not (pinned or self.projection.context or by_token or config.decay or narrow)
        self.rings = self.score.form == "dot" and self.span is None and not needs.tables

    @property
    def pattern(self) -> Pattern:
        """Return the pattern, without pinned tokens; with a span, as its weights are now."""
        return self.whole_pattern.recent if self.span is None else self.span.pattern

    def _needs(self) -> Needs:
        needs = Needs.of_parts(self.pattern, self.score, self.position, self.dropout)
        if isinstance(self.span, TokenSpan):
            return needs._replace(pairs=True)
        if self.pins[0]:
            return needs._replace(pairs=True, lse=True)
        return needs if self.span is None else needs._replace(tables=(*needs.tables, "bias"))

    @property
    def retained(self) -> int | None:
        horizon = self.pattern.horizon
        return None if horizon is None else max(horizon, self.projection.context)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> CacheState:
        like: Tensor = self.out.weight  # type: ignore[assignment]
        return self.shape.empty(batch, device or like.device, dtype or activation_dtype(like))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.shape.bytes(length, self.pattern.horizon, dtype)

    def forward(self, chunk: Chunk, state: CacheState, output_mask: Tensor | None = None) -> tuple[Tensor, CacheState]:
        call = AttentionCall(chunk, output_mask)
        if isinstance(state, PinnedState):
            call = call._replace(first=Pinned(state.first_keys, state.first_values))
            y, after, first = self._step(call, state.attention)
            assert first is not None
            return y, PinnedState(after, *first)  # type: ignore[call-arg]
        if not isinstance(state, SpanState):
            return self._step(call, state)[:2]
        assert isinstance(self.span, TokenSpan)
        z = self.span.of(select_valid(chunk.x, chunk.valid))
        y, after, _ = self._step(call._replace(z=z), state.attention)
        return y, SpanState(after, state.aux + self.span.cost(z, chunk.valid).to(state.aux.dtype))  # type: ignore[call-arg]

    def _step(self, call: AttentionCall, state: Slots) -> tuple[Tensor, Slots, Pinned | None]:
        attention, recent = state if isinstance(state, ContextState) else (state, None)  # type: ignore[misc]
        if not isinstance(attention, ReservedSlots):
            y, attention, recent, first = self._absorb(call, attention, recent)
        elif call.chunk.valid is None and call.chunk.reset is None:
            y, attention, recent, first = self._extend(call, attention, recent)
        else:
            room = attention.room
            y, value, recent, first = self._absorb(call, attention.release(), recent)
            attention = value.reserve(room)
        return y, attention if recent is None else ContextState(attention, recent), first  # type: ignore[call-arg]

    def _absorb(
        self, call: AttentionCall, state: KeysValues | DecayedKeysValues, recent: Tensor | None
    ) -> tuple[Tensor, KeysValues | DecayedKeysValues, Tensor | None, Pinned | None]:
        chunk = call.chunk
        positions = positions_of(chunk, state.seen)
        seen = advance(state.seen, chunk, positions)
        new = self._decayed(self._project(call, positions, seen, recent), chunk, positions, state)
        first, pinned = self._pinned(call, new, positions, seen)
        past, horizon = state[:-1], self.pattern.horizon
        seeing = new.behind(past) if self.crossing is None else self.behind_past((new.k, new.v), past[:2], horizon)
        y = self._attend(call, new.q, seeing, positions, not past[0].shape[2] and chunk.reset is None, pinned)
        retained = tuple(newest(chunk, slots, seen, horizon) for slots in new.after(past, seeing))
        retained, seen = self.row_end(retained, seen, state.k, positions.shape[1], horizon)
        return select_valid(y, chunk.valid), type(state)(*retained, seen), new.recent, first  # type: ignore[call-arg]

    def _extend(
        self, call: AttentionCall, state: ReservedSlots, recent: Tensor | None
    ) -> tuple[Tensor, ReservedSlots, Tensor | None, Pinned | None]:
        positions = state.positions(call.chunk)
        seen = positions[:, -1] + 1
        new = self._decayed(self._project(call, positions, seen, recent), call.chunk, positions, state)
        first, pinned = self._pinned(call, new, positions, seen)
        slots, state, full = state.extend(new.stored(state.buffers), self.pattern.horizon)
        seeing = new.read(slots, self.span is None and self.exclusive is None and self.differential is None)
        return self._attend(call, new.q, seeing, positions, full, pinned), state, new.recent, first

    def _decayed(self, new: NewTokens, chunk: Chunk, positions: Tensor, state: Cache) -> NewTokens:
        if self.decay is None or isinstance(state, KeysValues):
            return new
        last = state.last(2, positions.shape[1]) if isinstance(state, ReservedSlots) else state.sums[:, :, -1:]
        return new._replace(sums=sums_of(self.decay, select_valid(chunk.x, chunk.valid), chunk, positions, last))

    def _project(self, call: AttentionCall, positions: Tensor, seen: Tensor, recent: Tensor | None) -> NewTokens:
        chunk, output_mask = call.chunk, call.output_mask
        x = select_valid(chunk.x, chunk.valid)
        # No output is needed: the keys and values are absorbed without queries.
        if recent is None and output_mask is not None and is_empty_mask(output_mask):
            k, v = self.projection.keys_values(x)
            return NewTokens(None, self.position.rotate_keys(k, positions), self._values(v, chunk), None, None)
        q, k, v = self.projection(x)
        if recent is not None:
            batch, heads, past, head_dim = recent.shape
            nothing = q.new_zeros(batch, heads, self.projection.context - past, head_dim)
            tokens = torch.cat([nothing, recent.to(q.dtype), torch.cat([q, k, v], dim=1)], dim=2)
            q, k, v = self.projection.combine(tokens, None if chunk.reset is None else positions, x)
            recent = newest(chunk, tokens, seen, past + min(self.projection.context - past, q.shape[2]))
        far = None
        if call.first is not None:
            far = self.position.rotate(q, k, ranks(positions, *self.pins))[0]
        q, k = self.position.rotate(q, k, positions)
        return NewTokens(q, k, self._values(v, chunk), far, recent)

    def _values(self, v: Tensor, chunk: Chunk) -> Tensor:
        v = v if self.value_residual is None else self.value_residual(v, chunk.values)
        return probe("values", self.position.values(v))

    def _pinned(
        self, call: AttentionCall, new: NewTokens, positions: Tensor, seen: Tensor
    ) -> tuple[Pinned | None, Attended | None]:
        """Return the pinned tokens after the chunk, and its attention to those of them that have left the window."""
        if call.first is None:
            return None, None
        kv, first, chunk, attended = Pinned(new.k, new.v), call.first, call.chunk, None
        if new.far is not None:
            count, window = self.pins
            dropout = AttentionDropout.drawn(self.dropout, self.training)
            scoring = Scoring.of(self.score, self.position.relative(0, count + window - 1), dropout)
            if self.differential is not None:
                kv, first = (one._replace(v=self.differential.values(one.v)) for one in (kv, first))
            attended = attend_with_pinned(
                self.score.queries(new.far), kv, first, positions, window, chunk.reset is not None,
                scoring._replace(sink=None), self.impl,
            )  # fmt: skip
        return renewed(call.first, Pinned(new.k, new.v), chunk.valid, seen), attended

    def _attend(
        self,
        call: AttentionCall,
        q: Tensor | None,
        seeing: Sequence[Any],
        positions: Tensor,
        whole: bool,
        pinned: Attended | None,
    ) -> Tensor:
        """Attend, merge with what was attended to of ``pinned`` tokens, and project; ``whole``: every slot belongs to
        the sequence of every query of its row."""
        (k, v, *sums), output_mask = seeing, call.output_mask
        if q is None or (output_mask is not None and not output_mask.numel()):
            return v.new_zeros(*positions.shape, self.dim)
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        scoring = Scoring.of(self.score, relative_of(self.position, self.span, k.shape[2] - 1), dropout)
        scoring = scoring._replace(decay=sums[0][..., 0]) if sums else scoring
        visibility = Visibility(self.pattern, positions, whole)
        q = self.score.queries(q)
        v = v if self.differential is None else self.differential.values(v)
        if isinstance(self.span, TokenSpan):
            assert call.z is not None
            y = spans.attend_within_spans(q, k, v, call.z, self.span, visibility, scoring, self.impl)
        else:
            how = scoring, self.impl, self.crossing if self.goes_round else None
            attended = around((q, k, v), visibility, *how, lse=pinned is not None)
            y = (attended if pinned is None else merge(attended, pinned)).out
        y = y if self.exclusive is None else self.exclusive(y, v[:, :, -y.shape[2] :])
        y = y if self.differential is None else self.differential(y)
        return written(self.out, self.gate, probe("outputs", merge_heads(y)), call.chunk, output_mask, self.head_norm)


PARTS = {
    "SoftmaxAttention": SoftmaxAttention.Config,
}
