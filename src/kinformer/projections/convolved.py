"""Convolved projection: Primer's multi-dconv-head attention (So et al. 2021, Primer, section 4).

    z_t = sum_s w_s * y_{t-s},   s = 0 ... width - 1,   y = the heads of q, k and v as another projection makes them

a causal convolution over time with its own weights for every head and feature. Nothing before the first token of a
sequence enters it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.division import in_blocks
from kinformer.core.parts import Projection, ProjectionConfig
from kinformer.projections.multi_head import MultiHead
from kinformer.projections.shifted import shifted_sum
from kinformer.runtime.errors import KinformerError

SELF = 0.5
"""The weight of a token itself at the beginning; the other ``width - 1`` begin with ``SELF / width``."""


class Convolved(Projection):
    """The projection with ``weight`` [width, heads, head_dim], the heads of q, k and v one after the other; there is no
    bias.

    ``weight[0]`` is that of the token itself.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "convolved"
        width: int = 3
        inner: ProjectionConfig = MultiHead.Config()

        def __post_init__(self) -> None:
            if self.width < 2:
                raise KinformerError(
                    f"width must be 2 or more, but is {self.width}; a convolution of width 1 is its inner projection."
                )

        def part(self, parts: int) -> Convolved.Config:
            return self.replace(inner=self.inner.part(parts))

        def build(self, dim: int, num_heads: int, head_dim: int) -> Convolved:
            inner = self.inner.build(dim, num_heads, head_dim)
            if inner.context:
                raise KinformerError(
                    f"the projection {self.kind!r} cannot stand around {self.inner.kind!r}, which has a context of its "
                    "own; choose an inner projection without (multi_head, grouped)."
                )
            return Convolved(inner, self.width, num_heads, head_dim)

        def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
            return self.inner.build_output(dim, num_heads, head_dim, bias)

    def __init__(self, inner: Projection, width: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner, self.num_kv_heads, self.context = inner, inner.num_kv_heads, width - 1
        self.heads = [num_heads, inner.num_kv_heads, inner.num_kv_heads]
        in_blocks(self, *self.heads)
        self.weight = nn.Parameter(torch.full((width, sum(self.heads), head_dim), SELF / width))
        with torch.no_grad():
            self.weight[0] = SELF

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x)

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = None if positions is None else positions.__ge__
        q, k, v = shifted_sum(tokens, self.weight, inside).split(self.heads, dim=1)
        return q, k, v
