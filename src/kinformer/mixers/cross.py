"""Cross-attention (Vaswani et al. 2017, section 3.2.3): queries from the chunk, keys and values from a source.

    y = softmax(score(Q, K)) V,   Q = W_q x (``query``),   [K, V] = W_kv source (``key_value``)

The source is projected once, when a state is begun; its padding is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, ReadsSource, activation_dtype, select_valid
from kinformer.core.parts import ResidualOutput, ScoreConfig, head_width, merge_heads
from kinformer.core.source import checked_source
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.scores.scaled_dot import ScaledDot


class CrossState(NamedTuple):
    """The projected source: ``k``, ``v`` [batch, heads, source, head_dim] and ``valid`` [batch, 1, source] bool.

    A chunk of n times as many rows looks at it too: n neighbours share a row's source, as hypotheses of a beam do.
    """

    k: Tensor
    v: Tensor
    valid: Tensor

    slots = ("k", "v", "valid")  # type: ignore[misc]
    outlives_reset = True  # type: ignore[misc]


class CrossAttention(ReadsSource, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees the whole source of its row.

    ``source_dim`` is the width of the source, ``dim`` if None. A reset begins a new sequence over the same source. A
    row whose source is all padding gets the output projection's bias.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "cross"
        indivisible = "it projects the source before its forward pass"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def build(self, dim: int) -> CrossAttention:
            return CrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.num_heads, self.head_dim, self.impl = config.num_heads, head_dim, config.impl
        self.dropout = config.dropout
        self.score = config.score.build(config.num_heads, head_dim)
        check_impl(config.impl, Needs(sets=True, form=self.score.form, dropout=config.dropout > 0), "cross")
        width, self.source_dim = config.num_heads * head_dim, config.source_dim or dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key_value = nn.Linear(self.source_dim, 2 * width, bias=config.bias)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> CrossState:
        """Return the state of ``batch`` sequences over ``source`` [batch, length, source_dim], of which
        ``source_valid`` [batch, length] bool is real (None: all)."""
        source, source_valid = checked_source(source, source_valid, batch, self.source_dim)
        kv = self.key_value(source).to(device, dtype or activation_dtype(self.out.weight))
        k, v = kv.view(batch, source.shape[1], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        return CrossState(k, v, source_valid[:, None].to(kv.device))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        return source_length * (2 * self.num_heads * self.head_dim * dtype.itemsize + 1)

    def forward(self, chunk: Chunk, state: CrossState) -> tuple[Tensor, CrossState]:
        x = select_valid(chunk.x, chunk.valid)
        # Hypotheses of a beam share a source: their queries stand side by side in one row.
        q = self.query(x).view(len(state.k), -1, self.num_heads, self.head_dim).transpose(1, 2)
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        q, scoring = self.score.queries(q), Scoring.of(self.score, None, dropout)
        visibility = Visibility(key_padding_mask=~state.valid[:, 0])
        k, v = state.k.to(q.dtype), state.v.to(q.dtype)
        y = attention(q, k, v, visibility, scoring, impl=self.impl).out
        y = merge_heads(y).view(*x.shape[:2], -1)
        return select_valid(self.out(y), chunk.valid), state
