"""Grouped-query projection (Ainslie et al. 2023): several query heads share one key and value head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.division import divided, in_blocks
from kinformer.core.parts import Projection, ProjectionConfig, features_of
from kinformer.runtime.errors import KinformerError


class Grouped(Projection):
    """The projection to q [batch, num_heads, time, head_dim] and k, v [batch, num_kv_heads, time, head_dim]."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "grouped"
        num_kv_heads: int = 1
        bias: bool = True

        def part(self, parts: int) -> Grouped.Config:
            return self.replace(num_kv_heads=divided(self, "num_kv_heads", self.num_kv_heads, parts))

        def build(self, dim: int, num_heads: int, head_dim: int) -> Grouped:
            if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
                raise KinformerError(
                    f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {num_heads}; choose a divisor."
                )
            return Grouped(self, dim, num_heads, head_dim)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = config.num_kv_heads
        self.num_heads, self.head_dim = num_heads, head_dim
        widths = [heads * head_dim for heads in (num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = in_blocks(nn.Linear(dim, sum(widths), bias=config.bias), *widths)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = x.shape
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        heads = self.qkv(x).view(batch, time, sum(sizes), self.head_dim).transpose(1, 2)
        q, k, v = heads.split(sizes, dim=1)
        return q, k, v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, time, _ = x.shape
        projected = features_of(self.qkv, x, slice(self.num_heads * self.head_dim, None))
        heads = projected.view(batch, time, 2 * self.num_kv_heads, self.head_dim)
        k, v = heads.transpose(1, 2).chunk(2, dim=1)
        return k, v
