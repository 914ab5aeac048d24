"""A decay for every token and head (Peng et al. 2021, "Random Feature Attention").

    a_t = sigmoid(w . x_t + b)^(1 / temperature)

The paper's temperature is 1. A model begins with w . x_t + b near 0, so that half of the past is lost with every token,
and recall does not begin (``benchmarks/mqar.py``); at 16, as in GLA, it begins with a_t = 0.96.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.decays.decay import Decay, DecayConfig
from kinformer.runtime.errors import KinformerError


class Sigmoid(Decay):
    """The decay per head; ``coupled``, as in the paper: S_t = a_t S_(t-1) + (1 - a_t) k_t v_t^T."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecayConfig):
        kind = "sigmoid"
        coupled: bool = True
        temperature: float = 1.0

        def __post_init__(self) -> None:
            if self.temperature <= 0:
                raise KinformerError(f"temperature = {self.temperature:g} must be above 0.")

        def build(self, dim: int, num_heads: int, features: int) -> Sigmoid:
            return Sigmoid(self, dim, num_heads)

    def __init__(self, config: Config, dim: int, num_heads: int) -> None:
        super().__init__()
        self.coupled, self.temperature = config.coupled, config.temperature
        self.gate = nn.Linear(dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).transpose(1, 2)
        return functional.logsigmoid(gate.to(state_dtype(gate.dtype))) / self.temperature
