"""Coordinates of position and step, added before every step (Dehghani et al. 2019, section 2.1, equation 4).

    P(p, t) = signal(p) + step(t)        signal(n) = [sin(n f_0), sin(n f_1), ..., cos(n f_0), cos(n f_1), ...]
    f_k = 10000^(-k / (dim / 2 - 1))

As in the official code (tensor2tensor), sines come first and cosines second, and the slowest wave has the length of
10000 radians. ``step(t)`` is the same signal of the step's number, as in the paper, or a learned vector times the root
of the width, as the official code has it by default. Angles are computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig
from kinformer.runtime.errors import KinformerError

SLOWEST = 10000.0


class Timing(Position):
    """The signals of position and step; ``table`` [depth, dim] has one row per
    use of a layer, where steps are learned."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "timing"
        bounded_by_training = True
        step: Literal["sinusoidal", "learned"] = "sinusoidal"

        def build(self, dim: int) -> Timing:
            return self.build_model(dim, 1)

        def build_model(self, dim: int, depth: int) -> Timing:
            if dim < 4 or dim % 2:
                raise KinformerError(f"timing signals need an even width of 4 or more, but it is {dim}; change dim.")
            return Timing(self, dim, depth)

    def __init__(self, config: Config, dim: int, depth: int) -> None:
        super().__init__()
        self.dim = dim
        learned = config.step == "learned"
        self.table = nn.Parameter(torch.randn(depth, dim) * dim**-0.5) if learned else None

    def layer_input(self, positions: Tensor, layer: int) -> Tensor:
        return self._signal(positions) + self._step(positions, layer)

    def _step(self, positions: Tensor, layer: int) -> Tensor:
        if self.table is None:
            return self._signal(positions.new_full((), layer))
        return self.table[layer] * self.dim**0.5

    def _signal(self, numbers: Tensor) -> Tensor:
        """Return the signal [..., dim] of ``numbers`` [...] int64."""
        index = torch.arange(self.dim // 2, device=numbers.device, dtype=torch.float64)
        angles = numbers[..., None].to(torch.float64) * SLOWEST ** (-index / (self.dim // 2 - 1))
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.get_default_dtype())
