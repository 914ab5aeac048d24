"""Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to the token embeddings.

    PE(p, 2i) = sin(p / base^(2i / dim)),    PE(p, 2i + 1) = cos(p / base^(2i / dim))

The layout ``split`` has the same numbers, all sines before all cosines, as tensor2tensor and Marian have them.

Angles are computed in float64: at position 10^6 a float32 angle is 0.06 rad off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinformer.core.parts import Position, PositionConfig
from kinformer.runtime.errors import KinformerError


class Sinusoidal(Position):
    """Sines and cosines of the position, interleaved as in the paper unless set otherwise."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "sinusoidal"
        bounded_by_training = True
        base: float = 10000.0
        scale: float = 1.0  # factor on the encoding; 0.02-sized embeddings want a smaller one than 1
        layout: Literal["interleaved", "split"] = "interleaved"

        def build(self, dim: int) -> Sinusoidal:
            if dim % 2:
                raise KinformerError(f"sinusoidal positions need an even width, but the width is {dim}; change dim.")
            return Sinusoidal(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.base, self.scale, self.layout = dim, config.base, config.scale, config.layout

    def embed(self, positions: Tensor) -> Tensor:
        index = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions[..., None].to(torch.float64) * self.base ** (-index / self.dim)
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1)
        table = (waves.transpose(-1, -2) if self.layout == "split" else waves).flatten(-2)
        return table.to(torch.get_default_dtype()) * self.scale
