"""Linear attention as a recurrence, token by token: the truth that the fast kernels are held to.

S <- a S + k v^T,   z <- a z + k,   out = q^T S / (q . z + eps)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.linear.sequence import LinearSequence, accumulator_dtype


def recurrence(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``."""
    q, k, v, log_decay, eps, reset = sequence
    dtype = accumulator_dtype(q, k, v)
    s, z = s.to(dtype), z.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            fresh = reset[:, t, None, None]
            s, z = s.masked_fill(fresh[..., None], 0), z.masked_fill(fresh, 0)
        if log_decay is not None:
            decay = log_decay[:, :, t].to(dtype).exp().view(*z.shape[:2], -1)
            s, z = s * decay[..., None], z * decay
        query, key, value = (x[:, :, t].to(dtype) for x in (q, k, v))
        # S <- S + k v^T
        s = s + key[..., :, None] * value[..., None, :]
        z = z + key
        out = (query[..., :, None] * s).sum(-2)
        if eps is not None:
            out = out / ((query * z).sum(-1, keepdim=True) + eps)
        outputs.append(out)
    return torch.stack(outputs, 2).to(v.dtype), s, z
