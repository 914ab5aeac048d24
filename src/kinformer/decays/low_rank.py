"""A decay for every token and channel, a_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature).

(Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.3; W_1 of rank 16,
temperature 16, so that decays begin near 1.)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.decays.decay import Decay, DecayConfig
from kinformer.runtime.errors import KinformerError


class LowRank(Decay):
    """The decay per channel, logarithms of shape [batch, heads, time, features]."""

    by_channel = True

    @dataclass(frozen=True, kw_only=True)
    class Config(DecayConfig):
        kind = "low_rank"
        rank: int = 16
        temperature: float = 16.0

        def __post_init__(self) -> None:
            if self.rank < 1 or self.temperature <= 0:
                raise KinformerError(
                    f"rank = {self.rank} must be 1 or more, and temperature = {self.temperature:g} above 0."
                )

        def build(self, dim: int, num_heads: int, features: int) -> LowRank:
            return LowRank(self, dim, num_heads, features)

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.num_heads, self.temperature = num_heads, config.temperature
        self.down = nn.Linear(dim, config.rank, bias=False)
        self.up = nn.Linear(config.rank, num_heads * features)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(self.down(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        # log sigmoid(g)^(1 / temperature)
        return functional.logsigmoid(gate.to(state_dtype(gate.dtype))) / self.temperature
