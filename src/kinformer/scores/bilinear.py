"""Bilinear score (Luong et al. 2015, equation 8, "general"): q^T W k with a matrix W per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Score, ScoreConfig


class Bilinear(Score):
    """The score with ``weight`` [heads, head_dim, head_dim], which begins as the
    identity / sqrt(head_dim), the scaled dot."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "bilinear"

        def build(self, num_heads: int, head_dim: int) -> Bilinear:
            return Bilinear(num_heads, head_dim)

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.eye(head_dim) * head_dim**-0.5).repeat(num_heads, 1, 1))

    def queries(self, q: Tensor) -> Tensor:
        # q^T W k = (W^T q) . k, so that only queries change.
        return q @ self.weight
