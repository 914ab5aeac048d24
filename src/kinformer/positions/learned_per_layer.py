"""Learned positions at every layer (Al-Rfou et al. 2018, section 3.4): each layer's input has its own table added.

The sum enters the residual stream, so that what a layer adds is seen by all later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig
from kinformer.runtime.errors import KinformerError


class LearnedPerLayer(Position):
    """The tables, one [max_length, dim] per layer; a position at or beyond ``max_length`` is refused."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "learned_per_layer"
        bounded_by_training = True
        max_length: int = 512
        std: float = 0.02

        def __post_init__(self) -> None:
            if self.max_length < 1:
                raise KinformerError(f"max_length must be 1 or more, but is {self.max_length}.")

        def build(self, dim: int) -> LearnedPerLayer:
            return self.build_model(dim, 1)

        def build_model(self, dim: int, depth: int) -> LearnedPerLayer:
            return LearnedPerLayer(self, dim, depth)

    def __init__(self, config: Config, dim: int, depth: int) -> None:
        super().__init__()
        self.max_length = config.max_length
        tables = torch.randn(depth, config.max_length, dim) * config.std
        self.tables = nn.ParameterList(table.clone() for table in tables)

    def layer_input(self, positions: Tensor, layer: int) -> Tensor:
        try:
            return nn.functional.embedding(positions, self.tables[layer])
        except IndexError:
            raise KinformerError(
                f"position {int(positions.max())} has no embedding: learned positions end at max_length = "
                f"{self.max_length}; use a shorter context, or another position (rope, sinusoidal, none)."
            ) from None
