"""Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to the token embeddings.

    PE(p, 2i) = sin(p / base^(2i / dim)),    PE(p, 2i + 1) = cos(p / base^(2i / dim))

Angles are computed in float64: at position 10^6 a float32 angle is 0.06 rad off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.errors import KinformerError
from kinformer.core.parts import Position
from kinformer.positions.slots import AtTokens


class Sinusoidal(Position):
    """Interleaved sines and cosines as in the paper (not the split layout of some libraries)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(AtTokens):
        kind = "sinusoidal"
        base: float = 10000.0
        scale: float = 1.0  # factor on the encoding; 0.02-sized embeddings want a smaller one than 1

        def build(self, dim: int) -> Sinusoidal:
            if dim % 2:
                raise KinformerError(f"sinusoidal positions need an even width, but the width is {dim}; change dim.")
            return Sinusoidal(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.base, self.scale = dim, config.base, config.scale

    def embed(self, positions: Tensor) -> Tensor:
        index = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions[..., None].to(torch.float64) * self.base ** (-index / self.dim)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return table.to(torch.get_default_dtype()) * self.scale
