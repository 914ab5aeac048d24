"""Distances beyond which keys are lost to rounding, where a bias falls with the distance, as in ALiBi.

A query that sees itself has a weight of at least exp(b_0 - |q| |k|) before the normaliser, with the longest q and k.
All keys at the distance d or farther together weigh at most ``keys`` times exp(max b_d' + |q| |k|), d' >= d. From where

    max b_d' - b_0 + 2 |q| |k| + log keys < log(eps / 8)

they are lost when the normaliser is rounded, so they need not be looked at; nor need exponentials so small that some
processors take a hundred cycles for each of them, since they are subnormal.

``benchmarks/accelerators.py`` keeps it: by the rows ``falloff`` of ``accelerators.json``, ALiBi is 1.1 times as fast at
1,024 tokens, 2.0 at 4,096 and 3.7 at 16,384. Delete it when the row of 4,096 tokens is below 1.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORTH = 512
"""Keys from which on it pays to look for those that are too far."""

_ROUNDING = 1.01  # of the products, whose operands may be narrow


def reaches(q: Tensor, k: Tensor, bias: Tensor, heads: int) -> list[int]:
    """Return for each of ``heads`` the distance from which on keys are negligible, or as many as ``bias`` has.

    ``q`` [rows * heads, group, queries, head_dim] with the scale in it, ``k`` [rows * heads, keys, head_dim], ``bias``
    [heads or 1, group or 1, n] of the distances 0, 1, ...
    """
    longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1, dtype=bias.dtype).flatten(1).amax(1) for x in (q, k))
    products = (longest_q * longest_k).view(-1, heads).amax(0)
    ahead = bias.flip(-1).cummax(-1).values.flip(-1) - bias[..., :1]
    # The inequality above, solved for max b_d' - b_0.
    threshold = math.log(torch.finfo(bias.dtype).eps / 8) - math.log(k.shape[1]) - 2 * _ROUNDING * products
    counts = ~(ahead.amax(1) < threshold[:, None])  # where anything is NaN, all count
    return counts.sum(-1).tolist()
