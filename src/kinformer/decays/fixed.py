"""One constant decay a head (Sun et al. 2023, "Retentive Network", equation 8): gamma_h = 1 - 2^(-first - h)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.core.division import FollowsHeads
from kinformer.decays.decay import Decay, DecayConfig
from kinformer.runtime.errors import KinformerError


class Fixed(FollowsHeads, Decay):
    """The decays of heads h = 0, 1, ...: half of the state is left after 0.69 * 2^(first + h) tokens."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecayConfig):
        kind = "fixed"
        first: float = 5.0

        def __post_init__(self) -> None:
            if self.first <= 0:
                raise KinformerError(f"first must be above 0, as gamma is 1 - 2^-first, but is {self.first:g}.")

        def build(self, dim: int, num_heads: int, features: int) -> Fixed:
            return Fixed(self.first, num_heads)

    def __init__(self, first: float, num_heads: int) -> None:
        super().__init__()
        self.first, self.num_heads = first, num_heads

    def follow(self, whole: Fixed, part: int) -> None:
        self.first = whole.first + part * self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        exponents = torch.arange(self.num_heads, device=x.device, dtype=torch.float64) + self.first
        # log(1 - 2^-(first + h)), exact also where the decay is next to 1
        logs = torch.log1p(-torch.exp2(-exponents)).to(state_dtype(x.dtype))
        return logs[None, :, None].expand(x.shape[0], -1, x.shape[1])
