"""The delta rule as a recurrence, token by token: the truth that the fast kernels are held to.

W <- a W,   W <- W + k (beta (v - W^T e))^T,   out = W^T q;   W^T e is ``stored``, beta (v - W^T e) ``correction``;
e = k, unless it is given as ``erase``
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.linear.sequence import DeltaTokens, accumulator_dtype


def recurrence(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final W; shapes as for ``delta_rule``."""
    q, k, v, beta, erase, log_decay, reset = tokens
    dtype = accumulator_dtype(q, k, v)
    w = state.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            w = w.masked_fill(reset[:, t, None, None, None], 0)
        if log_decay is not None:
            w = w * log_decay[:, :, t].to(dtype).exp().view(*w.shape[:2], -1, 1)
        query, key, value, erased = (x[:, :, t].to(dtype) for x in (q, k, v, k if erase is None else erase))
        # W^T e
        stored = (w * erased[..., :, None]).sum(-2)
        correction = beta[:, :, t, None].to(dtype) * (value - stored)
        # W <- W + k (beta (v - W^T e))^T
        w = w + key[..., :, None] * correction[..., None, :]
        outputs.append((w * query[..., :, None]).sum(-2))
    return torch.stack(outputs, 2).to(v.dtype), w
