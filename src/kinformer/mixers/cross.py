"""Cross-attention (Vaswani et al. 2017, section 3.2.3): queries from the chunk, keys and values from a source.

    y = softmax(score(Q, K)) V,   Q = W_q x (``query``),   [K, V] = W_kv source (``key_value``)

The source is projected once, when a state is begun; its padding is masked. With a ``position`` a score also depends on
the distance p_t - j between the token that token t is aligned with, p_t = min(t, last token of the source), and token
j: rotary positions rotate queries by p_t and keys by j; the biases of ALiBi and T5, and the keys of Shaw and
Transformer-XL, are those of p_t - j, which is negative where j is ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, advance, positions_of, select_valid
from kinformer.core.parts import PositionConfig, ScoreConfig, merge_heads
from kinformer.core.state import State
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.patterns.full import Full
from kinformer.positions.none import NoPosition
from kinformer.projections.source import AlignedState, OverSource, OverSourceConfig
from kinformer.scores.scaled_dot import ScaledDot


class CrossAttention(OverSource):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees the whole source of its row.

    ``source_dim`` is the width of the source, ``dim`` if None. A reset begins a new sequence over the same source. A
    row whose source is all padding gets the output projection's bias. With a ``position`` the state also counts tokens.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(OverSourceConfig):
        kind = "cross"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        position: PositionConfig = NoPosition.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def build(self, dim: int) -> CrossAttention:
            return CrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.position)
        self.impl, self.dropout = config.impl, config.dropout
        self.counts = not isinstance(self.position, NoPosition)
        needs = Needs.of_parts(Full(), self.score, self.position, config.dropout)
        check_impl(config.impl, needs._replace(sets=True), "cross")

    def forward(self, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        x, source = select_valid(chunk.x, chunk.valid), state
        visibility, relative, after, aligned = Visibility(), None, state, None
        if isinstance(state, AlignedState):
            source, positions = state.source, positions_of(chunk, state.seen)
            after = AlignedState(source, advance(state.seen, chunk, positions))
            aligned = torch.minimum(positions, source.last(len(x))[:, None]).view(len(source.k), -1)
            length = source.k.shape[2]
            relative = self.position.relative(1 - length, length - 1)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(source.k), -1, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = source.k.to(q.dtype), source.v.to(q.dtype)
        if aligned is not None:
            q = self.position.rotate(q, q, aligned)[0]
        if aligned is not None and relative is not None:
            places = torch.arange(k.shape[2], device=k.device).expand(len(k), -1)
            visibility = Visibility(positions=aligned, key_positions=places)
        visibility = visibility._replace(key_padding_mask=~source.valid[:, 0])
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        q, scoring = self.score.queries(q), Scoring.of(self.score, relative, dropout)
        y = attention(q, k, v, visibility, scoring, impl=self.impl).out
        y = merge_heads(y).view(*x.shape[:2], -1)
        return select_valid(self.out(y), chunk.valid), after
