"""A gate of the heads' outputs, before the output projection (Qiu et al. 2025, Gated Attention; Qwen3-Next).

    y <- y * sigmoid(W_g x)

with a gate for every feature of a head (``element``) or one for every head (``head``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk, select_valid
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


def written(
    out: nn.Module,
    gate: OutputGate | None,
    heads: Tensor,
    chunk: Chunk,
    output_mask: Tensor | None = None,
    norm: nn.Module | None = None,
) -> Tensor:
    """Return merged ``heads`` [batch, time, width] through ``norm``, ``gate`` and the output projection ``out``, where
    ``output_mask`` [batch, time] (None: everywhere), zeros elsewhere."""
    shape, x = heads.shape[:2], None if gate is None else select_valid(chunk.x, chunk.valid)
    if output_mask is not None:
        heads, x = heads[output_mask], None if x is None else x[output_mask]
    heads = heads if norm is None else norm(heads)
    y: Tensor = out(heads if gate is None else gate(heads, x))
    return y if output_mask is None else y.new_zeros(*shape, y.shape[-1]).index_put((output_mask,), y)
