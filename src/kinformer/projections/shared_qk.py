"""Queries made of the keys: the projection of the whole Primer (So et al. 2021, appendix; the authors' ``MDHA``).

    k_t, v_t = sum_s w_s * (W x)_{t-s},   s = 0 ... width - 1          q_t = W_q k_t

Keys and values are convolved over time as in ``convolved``; queries are one more product of the convolved keys of all
heads, so that both have one representation. Nothing before the first token of a sequence enters the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.division import undivided
from kinformer.core.parts import Projection, ProjectionConfig, merge_heads
from kinformer.projections.convolved import SELF
from kinformer.projections.shifted import shifted_sum
from kinformer.runtime.errors import KinformerError


class SharedQK(Projection):
    """The projection with ``weight`` [width, 2 heads, head_dim] of the heads of k and v, one after the other;
    ``weight[0]`` is that of the token itself."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "shared_qk"
        width: int = 3
        bias: bool = False  # of keys and values

        def __post_init__(self) -> None:
            if self.width < 2:
                raise KinformerError(f"width must be 2 or more, but is {self.width}; the convolution mixes tokens.")

        def part(self, parts: int) -> SharedQK.Config:
            raise undivided(self, "its queries are made of the keys of all heads")

        def build(self, dim: int, num_heads: int, head_dim: int) -> SharedQK:
            return SharedQK(self, dim, num_heads, head_dim)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads, self.context, self.head_dim = num_heads, config.width - 1, head_dim
        width = num_heads * head_dim
        self.kv = nn.Linear(dim, 2 * width, bias=config.bias)
        self.query = nn.Linear(width, width, bias=False)
        self.weight = nn.Parameter(torch.full((config.width, 2 * num_heads, head_dim), SELF / config.width))
        with torch.no_grad():
            self.weight[0] = SELF

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, k and v before the convolution: queries are made behind it."""
        k, v = self.kv(x).unflatten(-1, (2, self.num_kv_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        return k, k, v

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = None if positions is None else positions.__ge__
        k, v = shifted_sum(tokens[:, self.num_kv_heads :], self.weight, inside).chunk(2, dim=1)
        q = self.query(merge_heads(k)).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        return q, k, v
