"""Predictive local cross-attention (Luong et al. 2015, section 3.2, local-p, equations 9 and 10): every token predicts
where in the source it looks.

    p_t = S sigmoid(v^T tanh(W x_t))                         (``place_in``: W, ``place_out``: v)
    y_t = sum_j a_tj exp(-(j - p_t)^2 / (2 sigma^2)) v_j,   a_t = softmax_j(score(q_t, k_j)),   |j - p_t| <= D

S is the length of the source, D = ``window`` and sigma = D / 2. The Gaussian falls on the probabilities, which no
longer sum to 1, and through it p_t learns. All heads look at one place, as the paper's one head does. In the code the
Gaussian is a bias g of the scores, whose softmax has the sum Z' where that of the scores has Z: y_t is its output times
Z' / Z.

Every token gathers a window of its own: time and memory follow the pairs, for a source of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk, select_valid
from kinformer.core.parts import ScoreConfig, merge_heads, wide_product
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.positions.none import NoPosition
from kinformer.projections.source import CrossState, OverSource, OverSourceConfig
from kinformer.runtime.errors import KinformerError
from kinformer.scores.scaled_dot import ScaledDot


class PredictiveCrossAttention(OverSource):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]; every token sees at most ``window`` tokens of its row's
    source on either side of the place that it predicts. ``hidden_dim`` is the width of W, ``dim`` if None.

    The wider the window, the more it is ``cross``. A token that sees padding alone gets the output projection's bias.
    A position would be one by whole distances, which predicted places do not have. Else as of ``cross``.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(OverSourceConfig):
        kind = "cross_predictive"
        num_heads: int = 4
        head_dim: int | None = None
        source_dim: int | None = None
        window: int = 10
        hidden_dim: int | None = None
        score: ScoreConfig = ScaledDot.Config()
        bias: bool = True
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.window < 1:
                raise KinformerError(
                    f"window must be 1 or more a side, twice the Gaussian's deviation, but is {self.window}."
                )

        def build(self, dim: int) -> PredictiveCrossAttention:
            return PredictiveCrossAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim, NoPosition.Config())
        self.window, self.impl, self.dropout = config.window, config.impl, config.dropout
        hidden_dim = config.hidden_dim or dim
        self.place_in = nn.Linear(dim, hidden_dim, bias=False)
        self.place_out = nn.Linear(hidden_dim, 1, bias=False)
        needs = Needs(sets=True, form=self.score.form, dropout=config.dropout > 0, lse=True, pairs=True)
        check_impl(config.impl, needs, "cross_predictive")

    def forward(self, chunk: Chunk, state: CrossState) -> tuple[Tensor, CrossState]:
        x = select_valid(chunk.x, chunk.valid)
        batch, time, _ = x.shape
        places = self.places(x, state)
        slots, seen = self._windows(state, places)
        rows = (torch.arange(batch, device=x.device) * len(state.k) // batch)[:, None, None]
        # [batch * time, heads, slots, head_dim], a set of keys for every token
        k, v = (item.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2) for item in state[:2])
        q = self.score.queries(self.query(x).view(batch * time, self.num_heads, 1, self.head_dim))
        k, v = k.to(q.dtype), v.to(q.dtype)
        distance = slots - places[..., None]
        # Equation 10 with sigma = D / 2: log exp(-distance^2 / (2 sigma^2))
        gaussian = (-2 * (distance / self.window).square()).flatten(0, 1)[:, None, None]
        dropout = AttentionDropout.drawn(self.dropout, self.training)
        plain, mask = Scoring.of(self.score, None, dropout), Visibility(attn_mask=seen.flatten(0, 1)[:, None, None])
        y, near = attention(q, k, v, mask, plain._replace(bias=gaussian), impl=self.impl, lse=True)
        every = attention(q, k, v[..., :1], mask, plain._replace(dropout=None), impl=self.impl, lse=True).lse
        assert near is not None and every is not None
        share = (near - every).masked_fill(every == -torch.inf, 0).exp()  # Z' / Z, of no matter where y is 0
        y = merge_heads(y * share.unsqueeze(-1).to(y.dtype)).view(batch, time, -1)
        return select_valid(self.out(y), chunk.valid), state

    def places(self, x: Tensor, state: CrossState) -> Tensor:
        """Return p_t [batch, time] of tokens x [batch, time, dim], in float32 or better: 0 .. the source's length."""
        # Places of a long source are not told apart in 16 bits.
        score = wide_product(self.place_out, wide_product(self.place_in, x).tanh())[..., 0]
        length = torch.where(state.valid[:, 0].any(-1), state.last(len(state.k)) + 1, 0)
        return score.sigmoid() * length.repeat_interleave(len(x) // len(length))[:, None]

    def _windows(self, state: CrossState, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots [batch, time, n] of the source near ``places`` [batch, time], and which of them a token
        sees, [batch, time, n] bool."""
        length, valid = state.k.shape[2], state.valid[:, 0]
        valid = valid.repeat_interleave(len(places) // len(valid), dim=0)
        if 2 * self.window + 1 >= length:  # the whole source is no more
            slots = torch.arange(length, device=valid.device).expand(*places.shape, -1)
        else:
            first = (places.detach() - self.window).ceil().to(torch.int64)
            slots = first[..., None] + torch.arange(2 * self.window + 1, device=valid.device)
        inside = (slots >= 0) & (slots < length) & ((slots - places.detach()[..., None]).abs() <= self.window)
        slots = slots.clamp(0, length - 1)
        return slots, inside & valid.gather(1, slots.flatten(1)).view(slots.shape)
