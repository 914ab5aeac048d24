"""RWKV's channel mixing: a feed-forward with squared ReLU behind a token shift (Peng et al. 2025, RWKV-7, section 4).

    x' = x_t + mu * (x_(t-1) - x_t),    y = W_v relu(W_k x')^2

with a mu for every channel. The token before the first one is zero. The state holds the last token. Decoders alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, positions_of, real_resets, select_valid, state_dtype
from kinformer.core.crossing import Crosses, recent_slots
from kinformer.core.division import divided
from kinformer.core.feed_forward import FeedForwardConfig
from kinformer.core.parts import ResidualOutput
from kinformer.projections.short_convolution import convolve
from kinformer.runtime.errors import KinformerError

SHIFT = 0.0625
"""How mu begins: 1 - (channel / dim)^p, as in a middle layer of the authors' models."""


@dataclass(frozen=True, kw_only=True)
class ChannelMix(FeedForwardConfig):
    """The config; neither product has a bias."""

    kind = "channel_mix"
    hidden_dim: int | None = None

    def part(self, dim: int, parts: int) -> ChannelMix:
        return self.replace(hidden_dim=divided(self, "hidden_dim", self.hidden_dim or 4 * dim, parts))

    def build(self, dim: int) -> CausalChannelMix:
        raise KinformerError(
            "the feed-forward 'channel_mix' looks at the token before, which in this layer none may; use it in the "
            "layer 'decoder' of a decoder, or mlp here."
        )

    def build_causal(self, dim: int) -> CausalChannelMix:
        return CausalChannelMix(self, dim)


class ShiftState(NamedTuple):
    """The last token [batch, 1, 1, dim], zero before a sequence."""

    recent: Tensor


class CausalChannelMix(Crosses, CausalMixer):
    """The feed-forward x [batch, time, dim] -> y [batch, time, dim], from a token and the one before it.
    ``shift`` [dim] is mu, ``up`` and ``down`` are W_k and W_v."""

    growth = "constant"

    def __init__(self, config: ChannelMix, dim: int) -> None:
        super().__init__()
        self.dim = dim
        hidden_dim = config.hidden_dim or 4 * dim
        self.shift = nn.Parameter(1 - (torch.arange(dim) / dim) ** SHIFT)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = ResidualOutput(hidden_dim, dim, bias=False)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> ShiftState:
        like = self.up.weight
        dtype = state_dtype(dtype or like.dtype)
        return ShiftState(torch.zeros(batch, 1, 1, self.dim, device=device or like.device, dtype=dtype))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.dim * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: ShiftState) -> tuple[Tensor, ShiftState]:
        x = select_valid(chunk.x, chunk.valid)[:, None]
        recent = state.recent
        if self.crossing is not None:
            recent, x = recent_slots(self.crossing, x, recent, positions_of(chunk, recent.new_zeros(0)))
        weight = torch.stack([1 - self.shift, self.shift])[:, None]
        mixed, recent = convolve(x, weight, recent, chunk.valid, real_resets(chunk))
        recent = recent if self.crossing is None else self.crossing.last(recent)
        return select_valid(self.down(self.up(mixed[:, 0]).relu().square()), chunk.valid), ShiftState(recent)
