"""Linear attention as a recurrence, token by token: the truth that the fast kernels are held to.

S <- S + k v^T,   z <- z + k,   out = q^T S / (q . z + eps)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.linear.blocks import accumulator_dtype


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``."""
    dtype = accumulator_dtype(q, k, v)
    s, z = s.to(dtype), z.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            fresh = reset[:, t, None, None]
            s, z = s.masked_fill(fresh[..., None], 0), z.masked_fill(fresh, 0)
        query, key, value = (x[:, :, t].to(dtype) for x in (q, k, v))
        s = s + key[..., :, None] * value[..., None, :]
        z = z + key
        out = (query[..., :, None] * s).sum(-2)
        if eps is not None:
            out = out / ((query * z).sum(-1, keepdim=True) + eps)
        outputs.append(out)
    return torch.stack(outputs, 2).to(v.dtype), s, z
