"""Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).

    y = softmax(scale * rotate(q) rotate(k)^T over the keys that the pattern allows) v,  then an output projection

(Vaswani et al. 2017, equation 1). The state holds the keys and values that a later query can still see, right-aligned:
a difference of slots is a difference of positions for every row, and ``seen`` says how many slots of a row are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    activation_dtype,
    advance,
    positions_of,
    right_align,
    select_valid,
)
from kinformer.core.errors import KinformerError
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ProjectionConfig,
    ResidualOutput,
    ScoreConfig,
    head_width,
    merge_heads,
)
from kinformer.kernels.block_sparse import Problem, block_sparse_attention
from kinformer.kernels.softmax import Dropout, Span, softmax_attention
from kinformer.kernels.softmax.buffers import ReservedKeysValues
from kinformer.patterns.band import Band
from kinformer.patterns.causal import Causal
from kinformer.positions.none import NoPosition
from kinformer.projections.shared import Shared
from kinformer.scores.scaled_dot import ScaledDot


class SoftmaxState(NamedTuple):
    """``k``, ``v`` [batch, kv_heads, past, head_dim] (rotated keys, right-aligned), ``seen`` [batch] int64."""

    k: Tensor
    v: Tensor
    seen: Tensor

    slots = ("k", "v")  # type: ignore[misc]

    def reserve(self, length: int) -> ReservedKeysValues:
        """A single-owner state with room for ``length`` more tokens, for generation under ``no_grad``."""
        return ReservedKeysValues.of(self, length)


class SoftmaxAttention(CausalMixer):
    """Multi-head attention over the chunk and the remembered past.

    Shapes: x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "softmax"
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = Shared.Config()
        position: PositionConfig = NoPosition.Config()
        pattern: PatternConfig = Causal.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True  # of the output projection
        dropout: float = 0.0  # of the attention probabilities
        impl: str = "auto"

        def build(self, dim: int) -> SoftmaxAttention:
            return SoftmaxAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.projection = config.projection.build(dim, config.num_heads, head_dim)
        self.position = config.position.build_heads(dim, config.num_heads, head_dim)
        self.score = config.score.build(config.num_heads, head_dim)
        self.pattern = config.pattern.build()
        if self.pattern.ahead != 0:
            raise KinformerError(
                f"the pattern {config.pattern.kind!r} lets a token see later ones, which a decoder must not; "
                "use a causal pattern (causal, local)."
            )
        self.head_dim, self.dropout, self.impl = head_dim, config.dropout, config.impl
        self.span = None
        if isinstance(self.pattern, Band) and self.score.form == "dot":
            self.span = Span(behind=self.pattern.behind, ahead=0)
        self.out = ResidualOutput(config.num_heads * head_dim, dim, bias=config.bias)
        self.growth = "linear" if self.pattern.horizon is None else "window"

    @property
    def retained(self) -> int | None:
        return self.pattern.horizon

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> SoftmaxState:
        like = self.out.weight
        device = device or like.device
        dtype = dtype or activation_dtype(like)
        empty = torch.zeros(batch, self.projection.num_kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return SoftmaxState(empty, empty, seen)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        past = length if self.retained is None else min(length, self.retained)
        return 2 * self.projection.num_kv_heads * past * self.head_dim * dtype.itemsize + 8

    def forward(
        self, chunk: Chunk, state: SoftmaxState | ReservedKeysValues
    ) -> tuple[Tensor, SoftmaxState | ReservedKeysValues]:
        if isinstance(state, SoftmaxState):
            return self._absorb(chunk, state)
        if chunk.valid is None and chunk.reset is None:
            return self._extend(chunk, state)
        room = state.room
        y, value = self._absorb(chunk, state.release())
        return y, value.reserve(room)

    def _absorb(self, chunk: Chunk, state: SoftmaxState) -> tuple[Tensor, SoftmaxState]:
        positions = positions_of(chunk, state.seen)
        q, k, v = self.projection(select_valid(chunk.x, chunk.valid))
        q, k = self.position.rotate(q, k, positions)
        past, time = state.k.shape[2], chunk.x.shape[1]
        if past:
            k, v = torch.cat([state.k.to(k.dtype), k], dim=2), torch.cat([state.v.to(v.dtype), v], dim=2)
        y = self._attend(q, k, v, positions, whole=not past and chunk.reset is None)
        seen = advance(state.seen, chunk, positions)
        return select_valid(y, chunk.valid), self._remember(chunk, k, v, seen, time)

    def _remember(self, chunk: Chunk, k: Tensor, v: Tensor, seen: Tensor, time: int) -> SoftmaxState:
        """The slots that a later query can see, right-aligned, zero where a row has none."""
        if chunk.valid is not None:
            count = chunk.valid.sum(dim=1)
            k, v = right_align(k, count, time), right_align(v, count, time)
        total = k.shape[2]
        start = 0 if self.retained is None else max(0, total - self.retained)
        k, v = k[:, :, start:], v[:, :, start:]
        if chunk.valid is not None or chunk.reset is not None:
            age = torch.arange(total - start, 0, -1, device=seen.device)
            filled = (age <= seen[:, None])[:, None, :, None]
            k, v = torch.where(filled, k, k.new_zeros(())), torch.where(filled, v, v.new_zeros(()))
        return SoftmaxState(k, v, seen)  # type: ignore[call-arg]

    def _extend(self, chunk: Chunk, state: ReservedKeysValues) -> tuple[Tensor, ReservedKeysValues]:
        positions = state.positions(chunk.x.shape[1])
        q, k, v = self.projection(chunk.x)
        q, k = self.position.rotate(q, k, positions)
        k, v, state, full = state.append(k, v, self.retained)
        return self._attend(q, k, v, positions, whole=full), state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, whole: bool) -> Tensor:
        """``whole``: every slot belongs to the sequence of every query of its row."""
        dropout = None
        if self.training and self.dropout > 0:
            dropout = Dropout(self.dropout, int(torch.randint(2**31, ())))
        q = self.score.queries(q)
        relative = self.position.relative(0, k.shape[2] - 1)
        if self.span is not None and relative is None:
            reach = None if whole else positions
            y = softmax_attention(
                q, k, v, span=self.span, scale=self.score.scale, reach=reach, dropout=dropout, impl=self.impl
            )
        else:
            problem = Problem(
                self.pattern, self.score.scale, positions, relative, self.score.form, self.score.vector(), dropout
            )
            y = block_sparse_attention(q, k, v, problem, self.impl)
        return self.out(merge_heads(y))
