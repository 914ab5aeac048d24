"""Projection of complex tokens (Wang et al. 2020, complex-order embeddings): real and imaginary parts one by one.

A token is [real; imaginary], and so is every head's share of q, k and v. Both parts are projected by the same real
weights, or each by its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.division import in_blocks
from kinformer.core.parts import Projection, ProjectionConfig, ResidualOutput
from kinformer.runtime.errors import KinformerError

PARTS = 2


class Complex(Projection):
    """The projection x [batch, time, dim] -> q, k, v [batch, num_heads, time, head_dim],
    dim / 2 and head_dim / 2 complex numbers."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "complex"
        shared: bool = True  # one set of weights for both parts
        bias: bool = True

        def part(self, parts: int) -> Complex.Config:
            return self

        def build(self, dim: int, num_heads: int, head_dim: int) -> Complex:
            if dim % PARTS or head_dim % PARTS:
                raise KinformerError(
                    f"the projection {self.kind!r} pairs real and imaginary features, but dim is {dim} and head_dim "
                    f"{head_dim}; use even ones."
                )
            return Complex(self, dim, num_heads, head_dim)

        def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> ComplexOutput:
            return ComplexOutput(dim, num_heads, head_dim, bias, self.shared)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_heads
        self.shape = (3, num_heads, head_dim // PARTS)
        width = num_heads * head_dim // PARTS
        self.qkv = nn.ModuleList(
            in_blocks(nn.Linear(dim // PARTS, 3 * width, bias=config.bias), width, width, width)
            for _ in range(1 if config.shared else PARTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = _apply_parts(self.qkv, x.unflatten(-1, (PARTS, -1)))
        q, k, v = parts.unflatten(-1, self.shape).permute(3, 0, 4, 1, 2, 5).flatten(-2).unbind()
        return q, k, v


class ComplexOutput(nn.Module):
    """The output projection: merged heads, each [real; imaginary], -> [batch,
    time, dim], [real; imaginary] as a whole."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, bias: bool, shared: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.parts = nn.ModuleList(
            ResidualOutput(num_heads * head_dim // PARTS, dim // PARTS, bias=bias)
            for _ in range(1 if shared else PARTS)
        )

    @property
    def weight(self) -> Tensor:
        """Return the weight of the real part."""
        return self.parts[0].weight  # type: ignore[return-value]

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, (self.num_heads, PARTS, -1)).transpose(-3, -2)
        return _apply_parts(self.parts, heads.flatten(-2)).flatten(-2)


def _apply_parts(modules: nn.ModuleList, x: Tensor) -> Tensor:
    """Return [..., parts, out] of x [..., parts, width], by one module for all parts, or one for each."""
    if len(modules) == 1:
        return modules[0](x)
    return torch.stack([module(part) for module, part in zip(modules, x.unbind(-2), strict=True)], dim=-2)
