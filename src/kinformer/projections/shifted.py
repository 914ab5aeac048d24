"""A causal convolution over time with separate weights for every head and channel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def shifted_sum(tokens: Tensor, weight: Tensor, inside: Callable[[int], Tensor] | None) -> Tensor:
    """Return y_t = sum_b weight[b] x_(t - b), b = 0 ... width - 1.

    tokens: x [batch, heads, width - 1 + time, channels], led by what came before; weight: [width, heads, channels].
    inside: whether the token ``b`` back is one of the same sequence, [batch, time] bool; None: all are.
    Returns [batch, heads, time, channels].
    """
    weight = weight.to(tokens.dtype)[:, :, None]
    context = len(weight) - 1
    mixed = tokens[:, :, context:] * weight[0]
    time = mixed.shape[2]
    for back in range(1, context + 1):
        earlier = tokens[:, :, context - back :][:, :, :time]
        if inside is not None:
            earlier = torch.where(inside(back)[:, None, :, None], earlier, earlier.new_zeros(()))
        mixed = torch.addcmul(mixed, earlier, weight[back])
    return mixed
