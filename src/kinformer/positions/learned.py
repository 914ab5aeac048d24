"""Learned absolute positions (Gehring et al. 2017; GPT-2), one vector per position, added to the token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig
from kinformer.runtime.errors import KinformerError


class Learned(Position):
    """A table [max_length, dim]; a position at or beyond ``max_length`` is refused."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "learned"
        bounded_by_training = True
        max_length: int = 1024
        std: float = 0.02

        def __post_init__(self) -> None:
            if self.max_length < 1:
                raise KinformerError(f"max_length must be 1 or more, but is {self.max_length}.")

        def build(self, dim: int) -> Learned:
            return Learned(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.table = nn.Parameter(torch.randn(config.max_length, dim) * config.std)

    def embed(self, positions: Tensor) -> Tensor:
        try:
            return nn.functional.embedding(positions, self.table)
        except IndexError:
            raise KinformerError(
                f"position {int(positions.max())} has no embedding: learned positions end at max_length = "
                f"{self.max_length}; use a shorter context, or another position (rope, sinusoidal, none)."
            ) from None
