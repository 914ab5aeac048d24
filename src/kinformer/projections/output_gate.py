"""A gate of the heads' outputs, before the output projection (Qiu et al. 2025, Gated Attention; Qwen3-Next).

    y <- y * sigmoid(W_g x)

with a gate for every feature of a head (``element``) or one for every head (``head``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.runtime.errors import choose

Gate = Literal["none", "head", "element"]
GATES = ("none", "head", "element")


class OutputGate(nn.Module):
    """The gate of y [..., num_heads * head_dim] by x [..., dim], the mixer's input."""

    def __init__(self, dim: int, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear = nn.Linear(dim, num_heads * width, bias=False)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(x)).unflatten(-1, (self.num_heads, -1))
        return (y.unflatten(-1, (self.num_heads, -1)) * gate).flatten(-2)


def build_gate(gate: Gate, dim: int, num_heads: int, head_dim: int) -> OutputGate | None:
    """Return the module of a mixer's field ``gate``, or None for "none"."""
    choose(gate, GATES, "gate")
    return None if gate == "none" else OutputGate(dim, num_heads, 1 if gate == "head" else head_dim)
