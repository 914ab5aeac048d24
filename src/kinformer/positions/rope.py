"""Rotary position embedding (Su et al. 2021, RoFormer, equation 34): queries and keys are rotated by their position.

    (x_i, x_j) -> (x_i cos a - x_j sin a, x_i sin a + x_j cos a),   a = position / base^(2i / width)

so that a product of a query and a key depends on their distance only. ``layout`` says which features form a pair:
``half`` pairs i with i + width/2 (GPT-NeoX, Llama), ``interleaved`` pairs 2i with 2i + 1 (the paper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinformer.core.errors import KinformerError
from kinformer.core.parts import Position, PositionConfig


class Rope(Position):
    """Angles in float64, rotation in the activations' dtype."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "rope"
        base: float = 10000.0
        layout: Literal["half", "interleaved"] = "half"

        def build(self, dim: int) -> Rope:
            if dim % 2:
                raise KinformerError(f"rope needs an even head_dim, but head_dim is {dim}.")
            return Rope(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.base, self.layout = dim, config.base, config.layout

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float64)
        angles = (positions[..., None].to(torch.float64) * self.base ** (-index / self.dim))[:, None]
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.layout == "half":
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
