"""The delta rule as a recurrence, token by token: the truth that the fast kernels are held to.

W <- a W,   W <- W + k (beta (v - W^T k))^T,   out = W^T q;   W^T k is ``stored``, beta (v - W^T k) ``correction``
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.linear.blocks import accumulator_dtype


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final W; arguments as for ``delta_rule``."""
    dtype = accumulator_dtype(q, k, v)
    w = state.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            w = w.masked_fill(reset[:, t, None, None, None], 0)
        if log_decay is not None:
            w = w * log_decay[:, :, t].to(dtype).exp().view(*w.shape[:2], -1, 1)
        query, key, value = (x[:, :, t].to(dtype) for x in (q, k, v))
        # W^T k
        stored = (w * key[..., :, None]).sum(-2)
        correction = beta[:, :, t, None].to(dtype) * (value - stored)
        # W <- W + k (beta (v - W^T k))^T
        w = w + key[..., :, None] * correction[..., None, :]
        outputs.append((w * query[..., :, None]).sum(-2))
    return torch.stack(outputs, 2).to(v.dtype), w
