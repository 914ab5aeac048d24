"""Local cross-attention (Luong et al. 2015, section 3.2, local-m): every token sees a window of the source around the
position that it is aligned with.

    y_t = softmax_j(score(q_t, k_j)) v_j,   |j - p_t| <= ``window``,   p_t = min(t, last token of the source)

Time and memory follow the pairs: consecutive tokens are attended to in blocks, whose windows are gathered. Alignment is
monotonic, as in speech or between languages of one word order; behind the end of the source a token sees its last ones.
With a ``position`` a score also depends on the distance p_t - j, as of ``cross``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.contract import Chunk, advance, positions_of, select_valid
from kinformer.core.parts import PositionConfig, ScoreConfig, merge_heads
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.patterns.full import Full
from kinformer.positions.none import NoPosition
from kinformer.projections.source import AlignedState, CrossState, OverSource, OverSourceConfig
from kinformer.runtime.errors import KinformerError
from kinformer.scores.scaled_dot import ScaledDot

BLOCK = 32
"""How many tokens share a window that is gathered."""


class LocalCrossAttention(OverSource):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees ``window`` tokens of its row's source on
    either side of the aligned one, and that.

    A window that reaches over the whole source is ``cross``. A token that sees padding alone gets the output
    projection's bias. Everything else is as of ``cross``.
    """

    counts = True

    @dataclass(frozen=True, kw_only=True)
    class Config(OverSourceConfig):
        kind = "cross_local"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        window: int = 10
        position: PositionConfig = NoPosition.Config()
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.window < 0:
                raise KinformerError(f"window must be 0 (the aligned token) or more a side, but is {self.window}.")

        def build(self, dim: int) -> LocalCrossAttention:
            return LocalCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, config.position)
        self.window, self.impl, self.dropout = config.window, config.impl, config.dropout
        needs = Needs.of_parts(Full(), self.score, self.position, config.dropout)
        check_impl(config.impl, needs._replace(sets=True, pairs=True), "cross_local")

    def forward(self, chunk: Chunk, state: AlignedState) -> tuple[Tensor, AlignedState]:
        x, source = select_valid(chunk.x, chunk.valid), state.source
        positions = positions_of(chunk, state.seen)
        after = AlignedState(source, advance(state.seen, chunk, positions))
        aligned = torch.minimum(positions, source.last(len(x))[:, None])
        (batch, time), heads = positions.shape, self.num_heads
        # Positions of a block follow each other but where a new sequence begins.
        block = 1 if chunk.reset is not None else min(BLOCK, time)
        q = self.query(x).view(batch, time, heads, self.head_dim)
        q = self.position.rotate(*(q.transpose(1, 2),) * 2, aligned)[0]
        q, aligned = pad(q, (0, 0, 0, -time % block)), pad(aligned, (0, -time % block))
        q, aligned = q.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1), aligned.view(batch, -1, block)
        slots, seen = self._windows(source, aligned)
        rows = (torch.arange(batch, device=slots.device) * len(source.k) // batch)[:, None, None]
        # [batch * blocks, heads, slots, head_dim], a set of keys for every block
        k, v = (item.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2) for item in source[:2])
        relative = self.position.relative(-self.window, self.window)
        mask = Visibility(attn_mask=seen.flatten(0, 1).unsqueeze(1))
        if relative is not None:
            mask = mask._replace(positions=aligned.flatten(0, 1), key_positions=slots.flatten(0, 1))
        scoring = Scoring.of(self.score, relative, AttentionDropout.drawn(self.dropout, self.training))
        q = self.score.queries(q)
        y = merge_heads(attention(q, k.to(q.dtype), v.to(q.dtype), mask, scoring, impl=self.impl).out)
        y = y.reshape(batch, -1, heads * self.head_dim)[:, :time]
        return select_valid(self.out(y), chunk.valid), after

    def _windows(self, source: CrossState, aligned: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots [batch, blocks, n] of the source that blocks of tokens ``aligned`` with slots [batch,
        blocks, block] may see, and which of them each sees, [batch, blocks, block, n] bool."""
        length, valid = source.k.shape[2], source.valid[:, 0]
        valid = valid.repeat_interleave(len(aligned) // len(valid), dim=0)
        reach = aligned.shape[-1] - 1 + 2 * self.window
        if reach + 1 >= length:  # the whole source is no more
            slots = torch.arange(length, device=valid.device).expand(*aligned.shape[:2], -1)
        else:
            slots = aligned[..., :1] - self.window + torch.arange(reach + 1, device=valid.device)
        inside = (slots >= 0) & (slots < length)
        slots = slots.clamp(0, length - 1)
        there = inside & valid.gather(1, slots.flatten(1)).view(slots.shape)
        near = (slots[:, :, None] - aligned[..., None]).abs() <= self.window
        return slots, near & there[:, :, None]
