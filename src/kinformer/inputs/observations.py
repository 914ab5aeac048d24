"""Observations of an agent, one position each: norm(W [o; 1]).

The norm makes vectors of one size of observations of any; the 1 beside them preserves how large an observation is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.input import Input, InputConfig
from kinformer.runtime.errors import KinformerError


class Observations(Input):
    """The input values [batch, time, observation_dim] float -> [batch, time, dim]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(InputConfig):
        kind = "observations"
        observation_dim: int

        def __post_init__(self) -> None:
            if self.observation_dim < 1:
                raise KinformerError(f"observation_dim must be 1 or more, but is {self.observation_dim}.")

        def build(self, dim: int) -> Observations:
            return Observations(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.product = nn.Linear(config.observation_dim + 1, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def check(self, values: Tensor) -> None:
        size = self.config.observation_dim
        if values.dim() != 3 or values.shape[1] < 1 or values.shape[2] != size or not values.is_floating_point():
            raise KinformerError(
                f"observations must be floats [batch, time, {size}] with time >= 1, but are {values.dtype} "
                f"{list(values.shape)}."
            )

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm(self.product(pad(values.to(self.product.weight.dtype), (0, 1), value=1.0)))

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, self.config.observation_dim, device=device)
