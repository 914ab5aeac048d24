"""Distance-aware attention (Wu et al. 2021, DA-Transformer, section 3.2): real distances rescale rectified scores.

    score(i, j) = relu(q_i . k_j) f(w_h |i - j|; v_h) / sqrt(head_dim),    f(x; v) = (1 + e^v) / (1 + e^(v - x))

f(0) = 1; with w > 0 it grows with the distance to at most 1 + e^v, with w < 0 it falls to 0. A score of 0 still has its
share of the softmax, so attention stays dense. There is no other encoding of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Position, PositionConfig, Relative


class DistanceAware(Position):
    """The position by real distances, learned per head: ``rate`` (the paper's w) and ``steepness`` (its v).

    The paper does not say how they begin: here w is spread over the heads from -spread to spread, and v is 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "distance_aware"
        spread: float = 0.1

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> DistanceAware:
            return DistanceAware(self, num_heads)

    def __init__(self, config: Config, num_heads: int) -> None:
        super().__init__()
        self.steepness = nn.Parameter(torch.zeros(num_heads))
        spread, device = config.spread, self.steepness.device  # transformers has linspace on the CPU unless named
        self.rate = nn.Parameter(torch.linspace(-spread, spread, num_heads, device=device))

    def relative(self, lowest: int, highest: int) -> Relative:
        dtype = state_dtype(self.rate.dtype)
        distance = torch.arange(lowest, highest + 1, device=self.rate.device).abs()
        x, v = self.rate.to(dtype)[:, None] * distance, self.steepness.to(dtype)[:, None]
        # f = (1 + e^v) / (1 + e^(v - x)) = sigmoid(x - v) / sigmoid(-v), by logarithms so that e^v cannot overflow
        return Relative(lowest, factor=(logsigmoid(x - v) - logsigmoid(-v)).exp())
