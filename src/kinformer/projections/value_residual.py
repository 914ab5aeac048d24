"""Values mixed with those of the first layer (Zhou et al. 2024, Value Residual Learning, arXiv 2410.17897).

    v_l <- lam v_l + (1 - lam) v_1

with a learnt lam for every layer, 1/2 at first. v_1 are the projected values of the same tokens in the first layer that
has a value residual; the cache holds what is mixed, so generation needs no more state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core.first_values import FirstValues, SharesValues


class ValueResidual(SharesValues, nn.Module):
    """The mixing of v [batch, kv_heads, time, head_dim]; a layer alone is the first."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.value_shape = kv_heads, head_dim
        self.mix = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, v: Tensor, channel: FirstValues | None) -> Tensor:
        first = v if channel is None else channel.of(v)
        return torch.lerp(first.to(v.dtype), v, self.mix.to(v.dtype))
