"""A decay for every token and head, a_t = sigmoid(w . x_t + b) (Peng et al. 2021, "Random Feature Attention")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.decays.decay import Decay, DecayConfig


class Sigmoid(Decay):
    """The decay per head; ``coupled``, as in the paper: S_t = a_t S_(t-1) + (1 - a_t) k_t v_t^T."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecayConfig):
        kind = "sigmoid"
        coupled: bool = True

        def build(self, dim: int, num_heads: int, features: int) -> Sigmoid:
            return Sigmoid(dim, num_heads, self.coupled)

    def __init__(self, dim: int, num_heads: int, coupled: bool) -> None:
        super().__init__()
        self.coupled = coupled
        self.gate = nn.Linear(dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).transpose(1, 2)
        return functional.logsigmoid(gate.to(state_dtype(gate.dtype)))
