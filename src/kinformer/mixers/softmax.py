"""Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).

    y = softmax(scale * q k^T over the keys that the pattern allows) v,  then an output projection

(Vaswani et al. 2017, equation 1). The state holds the keys and values that a later query can still see, right-aligned:
a difference of slots is a difference of positions for every row, and ``seen`` says how many slots of a row are valid. A
learnt ``span`` cuts the pattern, and with it the state, to the distances at which the heads look now. Where each token
has a span, the cost of the spans adds up in the state. Where the pattern pins the first tokens, the state holds them
too, and attention to them is merged with attention to the window. A ``decay`` lowers scores by the tokens between query
and key (``parts.decays``), and the state holds its sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kinformer.core.attention_state import CacheShape, CacheState, ContextState, Int8Past, Past, cache_of, context_of
from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, PartialOutput, select_valid
from kinformer.core.crossing import Crosses
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ProjectionConfig,
    ScoreConfig,
    SpanConfig,
    TokenSpan,
    check_causal,
    check_heads,
    check_score,
    check_unpinned,
    head_width,
    merge_heads,
    relative_of,
)
from kinformer.core.pattern import Pattern
from kinformer.core.probe import probe
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, check_impl
from kinformer.kernels.attention.spans import PinnedReach, Reach, SpanReach
from kinformer.parts.decays import DecayConfig, DecayReach, build_score_decay
from kinformer.parts.output_parts import (
    Exclusive,
    Gate,
    OutputNorm,
    OutputNormKind,
    ValueResidual,
    build_differential,
    build_gate,
    written,
)
from kinformer.parts.patterns.sequence import Causal, spanned
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import MultiHead, in_context
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.compiling import is_empty_mask


class SoftmaxAttention(Crosses, PartialOutput, CausalMixer):
    """Multi-head attention over the chunk and the remembered past: x [batch, time, dim] -> y [batch, time, dim].
    ``head_dim`` defaults to dim / num_heads."""

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
        pinned, by_token = self.whole_pattern.pinned, isinstance(self.span, TokenSpan)
        self.pins = pinned, (self.whole_pattern.recent.behind or 0) + 1
        check_score(config.score, self.score, self.position)
        self.decay = build_score_decay(config, dim, head_dim, self.score, self.position, pinned > 0 or by_token)
        self.dim, self.head_dim, self.dropout, self.impl = dim, head_dim, config.dropout, config.impl
        check_impl(config.impl, needs := self._needs(), "softmax")
        kv_heads = self.projection.num_kv_heads
        self.value_residual = ValueResidual(kv_heads, head_dim) if config.value_residual else None
        self.differential = build_differential(config.differential, config.num_heads, kv_heads, head_dim, self.position)
        self.exclusive = Exclusive(config.num_heads) if config.exclusive else None
        self.gate = build_gate(config.gate, dim, config.num_heads, head_dim)
        self.head_norm = None if config.head_norm == "none" else OutputNorm(config.num_heads, head_dim)
        self.out = config.projection.build_output(dim, config.num_heads, head_dim, config.bias)
        self.growth = "linear" if self.pattern.horizon is None else "window"
        narrow = config.cache == "int8"
        self.shape = CacheShape(
            config.num_heads, kv_heads, head_dim,
            context=self.projection.context, pinned=pinned, spans=by_token, decay=self.decay is not None, int8=narrow,
        )  # fmt: skip
        self.variants = tuple(one for one in (self.differential, self.exclusive) if one is not None)
        quantized = self.span is None and not self.variants
        self.opens: Callable[..., Past] = partial(Int8Past, quantized=quantized) if narrow else Past
        self.reach: Callable[..., Reach] = (
            PinnedReach if pinned else SpanReach if by_token else Reach if self.decay is None else DecayReach
        )
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

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> CacheState:
        return self.shape.empty(batch, device, dtype)

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.shape.bytes(length, self.pattern.horizon, dtype)

    def forward(self, chunk: Chunk, state: CacheState, output_mask: Tensor | None = None) -> tuple[Tensor, CacheState]:
        # Project
        x = select_valid(chunk.x, chunk.valid)
        past = self.opens(chunk, cache_of(state), self)
        reach = self.reach(self, state, past, x)
        q, k, v, recent = self._project(x, past, context_of(state), output_mask)
        if self.value_residual is not None:
            v = self.value_residual(v, chunk.values)

        # Position
        v = probe("values", self.position.values(v))
        if q is None:
            k = self.position.rotate_keys(k, past.positions)
        else:
            reach.project(q, k)
            q, k = self.position.rotate(q, k, past.positions)

        # Remember
        new, stored = reach.slots(k, v)
        slots, whole, after = past.remember(new, self.pattern.horizon, stored)
        if recent is not None:
            after = ContextState(after, recent)  # type: ignore[call-arg]
        after = reach.close(after)
        if q is None or (output_mask is not None and not output_mask.numel()):
            return v.new_zeros(*chunk.x.shape[:2], self.dim), after

        # Attend
        k, v, *others = slots
        v = self.values(v)
        visibility = Visibility(self.pattern, past.positions, whole)
        heads = reach.attend(self.score.queries(q), (k, v, *others), visibility)
        for variant in reversed(self.variants):
            heads = variant(heads, v)

        # Write
        y = written(self.out, self.gate, probe("outputs", merge_heads(heads)), chunk, output_mask, self.head_norm)
        return select_valid(y, chunk.valid), after

    def _project(
        self, x: Tensor, past: Past, recent: Tensor | None, output_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Return q, k and v of the chunk [batch, heads, time, head_dim], and the projections that later tokens need
        (None for a projection without context); q is None where no output is needed."""
        if recent is not None:
            (q, k, v), recent = in_context(self.projection, self.projection(x), recent, past, x)
            return q, k, v, recent
        if output_mask is not None and is_empty_mask(output_mask):
            return None, *self.projection.keys_values(x), None
        return *self.projection(x), None

    def scoring(self, farthest: int) -> Scoring:
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        return Scoring.of(self.score, relative_of(self.position, self.span, farthest), dropout)

    def values(self, v: Tensor) -> Tensor:
        for variant in self.variants:
            v = variant.values(v)
        return v


PARTS = {"SoftmaxAttention": SoftmaxAttention.Config}
