"""Exclusive self-attention (arXiv 2603.09078; in the form of modded-nanogpt): a head's output without what points along
the token's own value.

    y_t <- y_t - tanh(a_h) (y_t . u_t) u_t,    u_t = v_t / |v_t|

What a token brings to its own output the residual stream holds anyway. a_h is learnt for every head, 0 at first, where
nothing is taken away; at tanh(a_h) = 1 the output is orthogonal to the token's value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core.contract import state_dtype


class Exclusive(nn.Module):
    """The map of the heads' outputs y [batch, num_heads, time, width] and the values v [batch, kv_heads, time, width]
    of the same tokens."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(num_heads))

    def forward(self, y: Tensor, v: Tensor) -> Tensor:
        v = v.repeat_interleave(y.shape[1] // v.shape[1], 1).to(state_dtype(y.dtype))
        # A value of zeros has no direction: nothing is taken away.
        along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-12)
        return (y - self.strength.tanh()[:, None, None] * along * v).to(y.dtype)
