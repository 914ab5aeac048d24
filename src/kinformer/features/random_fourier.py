"""Random Fourier features of queries and keys of length 1 (Peng et al. 2021, "Random Feature Attention").

With x' = x / (|x| + eps) and W' = W diag(sigma) / temperature, W of D random rows a head:

    gaussian   phi(x) = D^(-1/2) [sin(W' x'), cos(W' x')]        (equation 4; exp(q' . k') up to a constant)
    arccos     phi(x) = D^(-1/2) relu(W' x')                     (appendix; the arc-cosine kernel)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.contract import state_dtype
from kinformer.core.feature_map import FeatureMap, FeatureMapConfig
from kinformer.core.learning import Resampled
from kinformer.features.directions import directions
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import KinformerError


class RandomFourier(FeatureMap, Resampled):
    """The feature map [batch, heads, time, head_dim] -> [.., 2 D]; D of the form arccos.

    ``features``: D, head_dim if None. ``learned``: sigma, one number a head and dimension, which begins at 1, is
    trained. ``redraw``: after how many training steps W is redrawn (0: never), which restarts carried states;
    the authors draw from a pool of 500 in every step. ``eps``: 1e-3 in their code.
    """

    weight: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "random_fourier"
        features: int | None = None
        form: Literal["gaussian", "arccos"] = "gaussian"
        learned: bool = True
        temperature: float = 1.0
        orthogonal: bool = False
        redraw: int = 0
        eps: float = 1e-3

        def __post_init__(self) -> None:
            if (self.features or 1) < 1 or self.redraw < 0 or self.temperature <= 0:
                raise KinformerError(
                    f"features = {self.features} must be 1 or more, redraw = {self.redraw} 0 or more, and "
                    f"temperature = {self.temperature:g} above 0."
                )

        def build_heads(self, num_heads: int, head_dim: int) -> RandomFourier:
            return RandomFourier(self, num_heads, head_dim)

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.form, self.eps, self.redraw = config.form, config.eps, config.redraw
        self.orthogonal, self.temperature = config.orthogonal, config.temperature
        self.count = config.features or head_dim
        self.negative = self.bounded = self.positive_on_average = config.form == "gaussian"
        self.register_buffer("weight", directions((num_heads, self.count, head_dim), self.orthogonal))
        self.sigma = nn.Parameter(torch.ones(num_heads, 1, head_dim)) if config.learned else None

    def draw(self, seed: int) -> None:
        self.weight.copy_(directions(tuple(self.weight.shape), self.orthogonal, seed))

    def size(self, head_dim: int) -> int:
        return self.count * (2 if self.form == "gaussian" else 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = state_dtype(x.dtype)
        weight = self.weight.to(wide)
        if self.sigma is not None:
            weight = weight * self.sigma.to(wide)
        with no_autocast(x.device):
            unit = x.to(wide)
            unit = unit / (torch.linalg.vector_norm(unit, dim=-1, keepdim=True) + self.eps)
            u = unit @ (weight / self.temperature).mT
        features = u.relu() if self.form == "arccos" else torch.cat([u.sin(), u.cos()], dim=-1)
        return (features * self.count**-0.5).to(x.dtype)
