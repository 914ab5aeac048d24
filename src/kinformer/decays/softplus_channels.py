"""A decay for every token and channel, a_t = exp(-A softplus(W_2 W_1 x_t + b)), with one A a head.

(The Kimi team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 4.) A begins uniform in
1 .. 16; b so that softplus(b) is log-uniform in 0.001 .. 0.1. With a ``lower_bound`` l < 0, a_t = exp(l sigmoid(A (W_2
W_1 x_t + b))) instead, no less than exp(l), and A begins at 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.decays.decay import Decay, DecayConfig
from kinformer.decays.softplus import first_steps
from kinformer.runtime.errors import KinformerError


class SoftplusChannels(Decay):
    """The decay per channel, logarithms of shape [batch, heads, time, features]: log A is ``log_rate`` [heads], b is
    ``step`` [heads, features]. ``rank``: of W_1 (that of a head's features if None)."""

    by_channel = True

    @dataclass(frozen=True, kw_only=True)
    class Config(DecayConfig):
        kind = "softplus_channels"
        rank: int | None = None
        lower_bound: float | None = None

        def __post_init__(self) -> None:
            if self.rank is not None and self.rank < 1:
                raise KinformerError(f"rank = {self.rank} must be 1 or more, or None for that of a head's features.")
            if self.lower_bound is not None and self.lower_bound >= 0:
                raise KinformerError(
                    f"lower_bound = {self.lower_bound:g} must be below 0, as it bounds the logarithm of a decay; use "
                    "about -5, or None for no bound."
                )

        def build(self, dim: int, num_heads: int, features: int) -> SoftplusChannels:
            return SoftplusChannels(self, dim, num_heads, features)

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.lower_bound, rank = config.lower_bound, config.rank or features
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, num_heads * features, bias=False)
        rate = torch.empty(num_heads).uniform_(1.0, 16.0).log_() if self.lower_bound is None else torch.zeros(num_heads)
        self.log_rate = nn.Parameter(rate)
        self.step = nn.Parameter(first_steps(num_heads, features))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(self.down(x)).unflatten(-1, self.step.shape).transpose(1, 2)
        dtype = state_dtype(gate.dtype)
        gate = gate.to(dtype) + self.step.to(dtype).unsqueeze(1)
        rate = self.log_rate.to(dtype).exp().view(-1, 1, 1)
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(rate * gate)
        return -rate * functional.softplus(gate)
