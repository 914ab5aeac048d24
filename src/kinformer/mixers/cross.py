"""Cross-attention (Vaswani et al. 2017, section 3.2.3): queries from the chunk, keys and values from a source.

    y = softmax(score(Q, K)) V,   Q = W_q x (``query``),   [K, V] = W_kv source (``key_value``)

The source is projected once, when a state is begun; its padding is masked.

Local cross-attention (Luong et al. 2015, section 3.2, local-m): every token sees a window of the source around the
position that it is aligned with.

    y_t = softmax_j(score(q_t, k_j)) v_j,   |j - p_t| <= ``window``,   p_t = min(t, last token of the source)

Time and memory follow the pairs: consecutive tokens are attended to in blocks, whose windows are gathered. Alignment is
monotonic, as in speech or between languages of one word order; behind the end of the source a token sees its last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    ReadsSource,
    activation_dtype,
    advance,
    positions_of,
    select_valid,
)
from kinformer.core.parts import ResidualOutput, ScoreConfig, head_width, merge_heads
from kinformer.core.source import checked_source
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.runtime.errors import KinformerError
from kinformer.scores.scaled_dot import ScaledDot

BLOCK = 32
"""How many tokens share a window that is gathered."""


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


class AlignedState(NamedTuple):
    """The ``source``, and ``seen`` [batch] int64, the tokens of each row's sequence so far."""

    source: CrossState
    seen: Tensor


class LocalCrossAttention(CrossAttention):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees ``window`` tokens of its row's source on
    either side of the aligned one, and that.

    A window that reaches over the whole source is ``cross``. A token that sees padding alone gets the output
    projection's bias. Everything else is as of ``cross``.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(CrossAttention.Config):
        kind = "cross_local"
        window: int = 10

        def __post_init__(self) -> None:
            if self.window < 0:
                raise KinformerError(f"window must be 0 (the aligned token) or more a side, but is {self.window}.")

        def build(self, dim: int) -> LocalCrossAttention:
            return LocalCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.window = config.window
        needs = Needs(sets=True, form=self.score.form, dropout=config.dropout > 0, pairs=True)
        check_impl(config.impl, needs, "cross_local")

    def initial_state(  # type: ignore[override]
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> AlignedState:
        state = super().initial_state(batch, device=device, dtype=dtype, source=source, source_valid=source_valid)
        return AlignedState(state, torch.zeros(batch, dtype=torch.int64, device=state.k.device))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        return super().state_bytes(length, dtype=dtype, source_length=source_length) + 8

    def forward(self, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        x, source = select_valid(chunk.x, chunk.valid), state.source
        positions = positions_of(chunk, state.seen)
        after = AlignedState(source, advance(state.seen, chunk, positions))
        batch, time = positions.shape
        # Positions of a block follow each other but where a new sequence begins.
        block = 1 if chunk.reset is not None else min(BLOCK, time)
        q = self.query(x)
        q, positions = (pad(item, (0, 0) * (item.dim() - 2) + (0, -time % block)) for item in (q, positions))
        blocks = q.shape[1] // block
        slots, seen = self._windows(source, positions.view(batch, blocks, block))
        rows = (torch.arange(batch, device=slots.device) * len(source.k) // batch)[:, None, None]
        # [batch, blocks, slots, heads, head_dim], a set of keys for every block
        k, v = (item.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2) for item in source[:2])
        q = self.score.queries(q.view(batch * blocks, block, self.num_heads, self.head_dim).transpose(1, 2))
        scoring = Scoring.of(self.score, None, AttentionDropout.drawn(self.dropout, self.training))
        mask = Visibility(attn_mask=seen.flatten(0, 1).unsqueeze(1))
        y = merge_heads(attention(q, k.to(q.dtype), v.to(q.dtype), mask, scoring, impl=self.impl).out)
        y = y.reshape(batch, blocks * block, -1)[:, :time]
        return select_valid(self.out(y), chunk.valid), after

    def _windows(self, source: CrossState, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots [batch, blocks, n] of the source that blocks of tokens at ``positions`` [batch, blocks,
        block] may see, and which of them each sees, [batch, blocks, block, n] bool."""
        length, valid = source.k.shape[2], source.valid[:, 0]
        real = torch.arange(length, device=valid.device).where(valid, 0)
        last = real.amax(-1).repeat_interleave(len(positions) // len(valid))
        valid = valid.repeat_interleave(len(positions) // len(valid), dim=0)
        aligned = torch.minimum(positions, last[:, None, None])
        reach = positions.shape[-1] - 1 + 2 * self.window
        if reach + 1 >= length:  # the whole source is no more
            slots = torch.arange(length, device=valid.device).expand(*positions.shape[:2], -1)
        else:
            slots = aligned[..., :1] - self.window + torch.arange(reach + 1, device=valid.device)
        inside = (slots >= 0) & (slots < length)
        slots = slots.clamp(0, length - 1)
        there = inside & valid.gather(1, slots.flatten(1)).view(slots.shape)
        near = (slots[:, :, None] - aligned[..., None]).abs() <= self.window
        return slots, near & there[:, :, None]
