"""Keys and values mixed with those of the token before, as far as the token says (Lin et al. 2025, Forgetting
Transformer, Pro block; arXiv 2503.02130, section 3): KV-shift.

    k_t <- a_t k_{t-1} + (1 - a_t) k_t,    v_t <- b_t v_{t-1} + (1 - b_t) v_t,    a_t, b_t = sigmoid(W x_t) by head

k and v are those that another projection makes; before the first token of a sequence they are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import state_dtype
from kinformer.core.division import in_blocks
from kinformer.core.parts import Projection, ProjectionConfig
from kinformer.projections.multi_head import MultiHead
from kinformer.runtime.errors import KinformerError


class KVShift(Projection):
    """The projection whose ``shift`` maps a token to a_t and b_t, one of each for every head of keys."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectionConfig):
        kind = "kv_shift"
        inner: ProjectionConfig = MultiHead.Config()

        def part(self, parts: int) -> KVShift.Config:
            return self.replace(inner=self.inner.part(parts))

        def build(self, dim: int, num_heads: int, head_dim: int) -> KVShift:
            inner = self.inner.build(dim, num_heads, head_dim)
            if inner.context:
                raise KinformerError(
                    f"the projection {self.kind!r} cannot stand around {self.inner.kind!r}, which has a context of its "
                    "own; choose an inner projection without (multi_head, grouped)."
                )
            return KVShift(inner, dim, num_heads)

        def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
            return self.inner.build_output(dim, num_heads, head_dim, bias)

    def __init__(self, inner: Projection, dim: int, num_heads: int) -> None:
        super().__init__()
        self.inner, self.num_kv_heads, self.context, self.num_heads = inner, inner.num_kv_heads, 1, num_heads
        self.shift = in_blocks(nn.Linear(dim, 2 * self.num_kv_heads, bias=False), self.num_kv_heads, self.num_kv_heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x)

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, moving = tokens.split([self.num_heads, 2 * self.num_kv_heads], dim=1)
        before, now = moving[:, :, :-1], moving[:, :, 1:]
        if positions is not None:
            before = torch.where((positions >= 1)[:, None, :, None], before, before.new_zeros(()))
        share = self.shift(x)
        share = torch.sigmoid(share.to(state_dtype(share.dtype))).to(now.dtype).mT[..., None]
        k, v = torch.lerp(now, before, share).chunk(2, dim=1)
        return q[:, :, 1:], k, v
