"""Attention whose scores decay with the tokens between query and key (Lin et al. 2025, Forgetting Transformer,
section 3).

    out_i = sum_j exp(scale * q_i . k_j + c_i - c_j) v_j / sum_j exp(...),    c = the logarithms of the decay, summed

c_i - c_j has rank two, so two more features of queries and keys make it of any kernel's products:

    scale * [q_i, 1 / scale, (c_i - r) / scale] . [k_j, r - c_j, 1]

c falls without bound and would take all digits of a score. Queries are therefore computed block by block, each block
with r = c of its middle token. Keys far behind, whose r - c_j has few digits, have weights that vanish. Where heads
share keys, each head has one feature of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.contract import state_dtype
from kinformer.kernels.softmax import Scoring, Visibility

ROWS = 1024
"""Queries in a block."""
_ALIGNED = 4
"""Widths are multiples of it: PyTorch's kernels of a GPU take no others in float32."""


def blocks(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring
) -> Iterator[tuple[Tensor, Tensor, Tensor, Visibility, Scoring]]:
    """Yield the calls without a decay, in float32 or better, whose outputs make up that with ``scoring.decay`` in
    order. Dropout, which is a function of the indices of a call, is left in one piece."""
    c, dtype, time, past = scoring.decay, state_dtype(q.dtype), q.shape[2], k.shape[2] - q.shape[2]
    assert c is not None
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scoring, padding = scoring._replace(decay=None), visibility.key_padding_mask
    rows = time if scoring.dropout is not None else ROWS
    for first in range(0, time, rows):
        stop = min(first + rows, time)
        keys = slice(past + stop)
        middle = past + (first + stop) // 2
        r = c[:, :, middle : middle + 1].detach()
        at_queries, at_keys = ((c[:, :, part] - r).to(dtype) for part in (slice(past + first, past + stop), keys))
        wide_q, wide_k = _widened(q[:, :, first:stop], k[:, :, keys], at_queries, at_keys, scoring.scale)
        seen = visibility._replace(
            positions=None if visibility.positions is None else visibility.positions[:, first:stop],
            key_padding_mask=None if padding is None else padding[:, keys],
        )
        yield wide_q, wide_k, v[:, :, keys], seen, _with_features(scoring, wide_q.shape[3] - q.shape[3])


def _with_features(scoring: Scoring, count: int) -> Scoring:
    """Return ``scoring`` whose keys by distance have ``count`` more features, which add nothing."""
    relative = scoring.relative
    if relative is None or relative.keys is None:
        return scoring
    shift = None if relative.shift is None else pad(relative.shift, (0, count))
    return scoring._replace(relative=relative._replace(keys=pad(relative.keys, (0, count)), shift=shift))


def _widened(q: Tensor, k: Tensor, at_queries: Tensor, at_keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys with the features of the decay, c - r ``at_queries`` and ``at_keys``
    [batch, heads, ...]."""
    batch, heads, time, _ = q.shape
    group = heads // k.shape[1]
    rest = -(q.shape[3] + group + 1) % _ALIGNED
    choosing = torch.eye(group, dtype=q.dtype, device=q.device).repeat(k.shape[1], 1) / scale
    choosing = choosing[None, :, None].expand(batch, -1, time, -1)
    zeros = q.new_zeros(())
    q = torch.cat([q, choosing, at_queries[..., None] / scale, zeros.expand(batch, heads, time, rest)], -1)
    shared = -at_keys.unflatten(1, (-1, group)).transpose(2, 3)  # [batch, kv_heads, slots, group]
    ones = k.new_ones(()).expand(*k.shape[:3], 1)
    return q, torch.cat([k, shared, ones, zeros.expand(*k.shape[:3], rest)], -1)
