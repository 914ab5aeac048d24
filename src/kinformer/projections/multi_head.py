"""One projection for all tokens: every head has its own query, key and value (Vaswani et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.division import in_blocks
from kinformer.core.parts import Projection, ProjectionConfig, features_of


class MultiHead(Projection):
    """The projection x [batch, time, dim] -> q, k, v [batch, num_heads, time, head_dim], in one product."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "multi_head"
        bias: bool = True

        def part(self, parts: int) -> MultiHead.Config:
            return self

        def build(self, dim: int, num_heads: int, head_dim: int) -> MultiHead:
            return MultiHead(self, dim, num_heads, head_dim)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_heads
        self.shape = (3, num_heads, head_dim)
        width = num_heads * head_dim
        self.qkv = in_blocks(nn.Linear(dim, 3 * width, bias=config.bias), width, width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, *self.shape).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, time, _ = x.shape
        projected = features_of(self.qkv, x, slice(self.shape[1] * self.shape[2], None))
        k, v = projected.view(batch, time, 2, *self.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        return k, v
