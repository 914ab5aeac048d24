"""A norm of the heads' outputs before their gate (Lin et al. 2025, Forgetting Transformer, Pro block; RetNet's place).

    y_h <- w_h * y_h / rms(y_h)

with a weight for every head and feature.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kinformer.runtime.errors import choose

OutputNormKind = Literal["none", "rms"]


class OutputNorm(nn.Module):
    """The norm of merged heads y [..., num_heads * width], with ``weight`` [num_heads, width]."""

    def __init__(self, num_heads: int, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, width))

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, self.weight.shape)
        return (rms_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight.to(y.dtype)).flatten(-2)


def build_norm(norm: OutputNormKind, num_heads: int, head_dim: int) -> OutputNorm | None:
    """Return the module of a mixer's field ``head_norm``, or None for "none"."""
    choose(norm, ("none", "rms"), "head_norm")
    return None if norm == "none" else OutputNorm(num_heads, head_dim)
