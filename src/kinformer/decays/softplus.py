"""A decay for every token and head, a_t = exp(-A softplus(w . x_t + b)) (Gu and Dao 2023, Mamba; Dao and Gu 2024).

Gated DeltaNet's (Yang et al. 2025). A, one number a head, begins uniform in 0 .. 16; b so that softplus(b) is
log-uniform in 0.001 .. 0.1. Coupled, softplus(w . x_t + b) is the step by which a token enters the state (Mamba-2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.decays.decay import Decay, DecayConfig

_LOW, _HIGH, _LARGEST = 1e-3, 0.1, 16.0


class Softplus(Decay):
    """The decay per head: log A is ``log_rate`` [heads], b is ``step`` [heads]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DecayConfig):
        kind = "softplus"
        coupled: bool = False

        def build(self, dim: int, num_heads: int, features: int) -> Softplus:
            return Softplus(dim, num_heads, self.coupled)

    def __init__(self, dim: int, num_heads: int, coupled: bool) -> None:
        super().__init__()
        self.coupled = coupled
        self.gate = nn.Linear(dim, num_heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1e-4, _LARGEST).log_())
        self.step = nn.Parameter(first_steps(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        dtype = state_dtype(gate.dtype)
        softplus = functional.softplus(gate.to(dtype) + self.step.to(dtype))
        return (-self.log_rate.to(dtype).exp() * softplus).transpose(1, 2)

    def entering(self, log_decay: Tensor) -> Tensor:
        """Return the steps softplus(w . x + b), log a divided by -A."""
        return -log_decay * (-self.log_rate.to(log_decay.dtype)).exp().unsqueeze(-1)


def first_steps(*shape: int) -> Tensor:
    """Return biases b of that shape with which softplus(b) is log-uniform in 0.001 .. 0.1."""
    step = torch.empty(shape).uniform_(math.log(_LOW), math.log(_HIGH)).exp_()
    # The inverse of softplus: b = s + log(1 - e^-s)
    return step + torch.log(-torch.expm1(-step))
