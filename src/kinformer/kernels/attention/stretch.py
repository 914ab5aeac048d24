"""Softmax attention of one stretch of a row to the keys of the whole row, of which other processes have the rest.

Keys and values of all stretches are gathered; the gradient is a reduce-scatter. Queries see both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.crossing import Row
from kinformer.core.pattern import Pattern
from kinformer.kernels.attention import attention
from kinformer.kernels.impls import AttentionImpl
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility


def of_stretch(qkv: Sequence[Tensor], row: Row, pattern: Pattern, scoring: Scoring, impl: AttentionImpl) -> Attended:
    """Return attention of q [batch, heads, time, head_dim] to the keys of the whole ``row`` that ``pattern`` allows, by
    positions; k and v are this stretch's."""
    q, k, v = qkv
    time = q.shape[2]
    begin = row.begin(time)
    end = begin + time
    k, v = row.crossing.row(torch.cat([k, v], dim=-1), 2).split([k.shape[-1], v.shape[-1]], dim=-1)
    padding = None if row.valid is None else ~row.valid
    places = torch.arange(k.shape[2], device=q.device).expand(len(q), -1)
    if pattern.band == (None, None):
        visibility = Visibility(key_padding_mask=padding)
        if scoring.relative is not None:
            visibility = visibility._replace(positions=places[:, begin:end], key_positions=places)
        return attention(q, k, v, visibility, scoring, impl=impl)
    first = 0 if pattern.behind is None else max(0, begin - max(0, pattern.behind))
    last = k.shape[2] if pattern.ahead is None else min(k.shape[2], end + max(0, pattern.ahead))
    # The last query stands at the last key: queries of nothing stand at those ahead.
    visibility = Visibility(
        pattern,
        positions=places[:, begin:last],
        key_padding_mask=None if padding is None else padding[:, first:last],
    )
    q, k, v = pad(q, (0, 0, 0, last - end)), k[:, :, first:last], v[:, :, first:last]
    return Attended(attention(q, k, v, visibility, scoring, impl=impl).out[:, :, :time])
