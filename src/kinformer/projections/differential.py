"""Differential attention (Ye et al. 2024, Differential Transformer, arXiv 2410.05258, equations 1 to 3).

    y_i = (1 - lam_init) rms((softmax(q_i k_i^T) - lam softmax(q_j k_j^T)) [v_i; v_j]),   j = i + heads / 2
    lam = exp(a . b) - exp(c . d) + lam_init

Heads i and j are a pair whose difference is taken: what both attend to, noise, cancels. They share the pair of their
values, which is twice as wide as a head; a pair stands half the heads apart, as in DiffLlama. ``initial`` is lam_init,
0.8 - 0.6 exp(-0.3 l) in layer l = 0, 1, ... of the paper. a, b, c and d begin as N(0, 0.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kinformer.core.contract import state_dtype
from kinformer.core.parts import Position
from kinformer.runtime.errors import KinformerError


class Differential(nn.Module):
    """The pairing of values, and the difference of the heads' outputs."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, initial: float, position: Position) -> None:
        super().__init__()
        if num_heads % 2 or kv_heads % 2:
            raise KinformerError(
                f"differential attention takes differences of pairs of heads, but there are {num_heads} heads with "
                f"{kv_heads} of keys; make both numbers even."
            )
        if not 0 <= initial < 1:
            raise KinformerError(f"differential is lam at first, from 0 to below 1, but is {initial:g}.")
        relative = position.relative(0, 1)
        if relative is not None and relative.values is not None:
            raise KinformerError(
                "differential attention pairs the values of heads, to which no position can add values by distance "
                "(shaw); use another position, such as rope, t5 or alibi."
            )
        self.initial = initial
        self.vectors = nn.Parameter(0.1 * torch.randn(4, head_dim))

    def values(self, v: Tensor) -> Tensor:
        """Return values [batch, kv_heads, slots, head_dim] as those of pairs, twice as wide."""
        pairs = torch.cat(v.chunk(2, 1), -1)
        return torch.cat([pairs, pairs], 1)

    def forward(self, y: Tensor) -> Tensor:
        """Return the pairs' outputs [batch, heads / 2, time, 2 * head_dim] of those of heads, [batch, heads, ...]."""
        a, b, c, d = self.vectors.to(state_dtype(self.vectors.dtype))
        lam = ((a * b).sum().exp() - (c * d).sum().exp() + self.initial).to(y.dtype)
        one, two = y.chunk(2, 1)
        return rms_norm(one - lam * two, y.shape[-1:], eps=1e-5) * (1 - self.initial)


def build_differential(
    initial: float | None, num_heads: int, kv_heads: int, head_dim: int, position: Position
) -> Differential | None:
    """Return the module of a mixer's field ``differential``, or None for None."""
    return None if initial is None else Differential(num_heads, kv_heads, head_dim, initial, position)
