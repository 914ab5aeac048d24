"""Residuals of acting Transformers (Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning).

A sublayer F reads the normed stream, so that the stream itself goes through all layers untouched (identity map
reordering, section 3.1), and its output is y = relu(F(norm(x))). The stream after it is x + y (TrXL-I), or one of the
gates of section 3.2:

    gru        r = s(W_r y + U_r x);  z = s(W_z y + U_z x - b);  h = tanh(W_h y + U_h (r x));  (1 - z) x + z h
    input      s(W x) x + y
    output     x + s(W x - b) y
    highway    s(W x + b) x + (1 - s(W x + b)) y
    sigtanh    x + s(W y - b) tanh(U y)

s is the sigmoid; b is learnt, a number for each feature, and begins at ``bias``: above 0 every layer begins near the
identity, which is what makes training stable (section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.blocks.norms import NormConfig
from kinformer.blocks.residual import Residual, ResidualConfig
from kinformer.core.config import check_unused

Gate = Literal["gru", "input", "output", "highway", "sigtanh"]


class Reordered(Residual):
    """The residual x + relu(F(norm(x))), TrXL-I."""

    additive = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ResidualConfig):
        kind = "reordered"

        def build(self, dim: int, norm: NormConfig, dropout: float) -> Reordered:
            return Reordered(dim, norm, dropout)

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, y: Tensor) -> Tensor:
        return super().add(y.relu())


class Gated(Reordered):
    """The residual gate(x, relu(F(norm(x)))), GTrXL."""

    additive = False
    undroppable = "a gate of the residual 'gated' does not leave the stream as it is where a sublayer gives nothing"

    @dataclass(frozen=True, kw_only=True)
    class Config(ResidualConfig):
        kind = "gated"
        gate: Gate = "gru"
        bias: float = 2.0

        def __post_init__(self) -> None:
            if self.gate == "input":
                check_unused(self, "with the gate 'input', which has none", "bias")

        def build(self, dim: int, norm: NormConfig, dropout: float) -> Gated:
            return Gated(self, dim, norm, dropout)

    def __init__(self, config: Config, dim: int, norm: NormConfig, dropout: float) -> None:
        super().__init__(dim, norm, dropout)
        self.gate = config.gate
        of_x, of_y = {"gru": (2, 3), "sigtanh": (0, 2)}.get(config.gate, (1, 0))
        self.of_x = nn.Linear(dim, of_x * dim, bias=False) if of_x else None
        self.of_y = nn.Linear(dim, of_y * dim, bias=False) if of_y else None
        self.of_reset = nn.Linear(dim, dim, bias=False) if config.gate == "gru" else None
        self.bias = nn.Parameter(torch.full((dim,), float(config.bias))) if config.gate != "input" else None

    def leave(self, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
        y = self.added(y, share)
        if self.of_reset is not None:
            return self._gru(x, y)
        if self.gate == "sigtanh":
            assert self.of_y is not None
            opening, candidate = self.of_y(y).chunk(2, dim=-1)
            return x + (opening - self.bias).sigmoid() * candidate.tanh()
        assert self.of_x is not None
        if self.gate == "input":
            return self.of_x(x).sigmoid() * x + y
        if self.gate == "output":
            return x + (self.of_x(x) - self.bias).sigmoid() * y
        gate = (self.of_x(x) + self.bias).sigmoid()
        return gate * x + (1 - gate) * y

    def _gru(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.of_x is not None and self.of_y is not None and self.of_reset is not None
        reset_y, update_y, candidate_y = self.of_y(y).chunk(3, dim=-1)
        reset_x, update_x = self.of_x(x).chunk(2, dim=-1)
        # z = s(W_z y + U_z x - b), near 0 at first, so that the layer begins near the identity
        update = (update_y + update_x - self.bias).sigmoid()
        candidate = (candidate_y + self.of_reset((reset_y + reset_x).sigmoid() * x)).tanh()
        # (1 - z) x + z h
        return torch.lerp(x, candidate.to(x.dtype), update.to(x.dtype))
