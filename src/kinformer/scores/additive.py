"""Additive score (Bahdanau et al. 2015, appendix A.1.2): v . tanh(W q + U k).

The mixer's projections of queries and keys are W and U (and the bias inside); only v is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Score, ScoreConfig


class Additive(Score):
    """The score with ``weight`` [heads, head_dim], v, which begins as N(0, 1 /
    head_dim). It costs head_dim tanh per pair."""

    form = "additive"

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "additive"

        def build(self, num_heads: int, head_dim: int) -> Additive:
            return Additive(num_heads, head_dim)

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim) * head_dim**-0.5)

    def vector(self) -> Tensor:
        return self.weight
