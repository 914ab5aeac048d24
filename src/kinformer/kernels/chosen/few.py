"""Attention of a few queries to chosen blocks, whose keys and values are gathered: generation."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.chosen.chunked import ChosenCall
from kinformer.runtime.autocast import no_autocast


def attend(call: ChosenCall) -> Tensor:
    """Return the output [batch, heads, time, head_dim_v], by operations that autograd differentiates."""
    q, size, choosers = call.q, call.size, call.chosen.shape[1]
    batch, heads, time, width = q.shape
    current = call.current[:, None, :, None].expand(-1, choosers, -1, -1)
    chosen = torch.cat([call.chosen, current], -1)
    place = torch.arange(size, device=q.device)
    # All of a chosen block is earlier than the query, of the current block as much as the query's place there says.
    last = torch.where(call.chosen < 0, -1, size - 1)
    seen = place <= torch.cat([last, call.offset[:, None, :, None].expand_as(current)], -1).unsqueeze(-1)
    index = call.first[:, None, None].expand(-1, *chosen.shape[1:3], -1).gather(3, chosen.clamp_min(0))
    index = (index.unsqueeze(-1) + place).clamp(0, call.k.shape[2] - 1).flatten(2)
    wide = state_dtype(q.dtype)
    keys, values = (_gathered(x, index, choosers).unflatten(2, (time, -1)).to(wide) for x in (call.k, call.v))
    grouped = q.to(wide).view(batch, choosers, -1, time, width).transpose(2, 3)
    with no_autocast(q.device):
        scores = (grouped @ keys.mT * call.scale).masked_fill(~seen.flatten(3).unsqueeze(3), -torch.inf)
        out = scores.softmax(-1) @ values
    return out.transpose(2, 3).reshape(batch, heads, time, -1).to(call.v.dtype)


def _gathered(x: Tensor, index: Tensor, choosers: int) -> Tensor:
    """Return the slots ``index`` [batch, choosers, n] of ``x`` [batch, kv_heads, slots, width]."""
    share = choosers // x.shape[1]
    # Of one matrix at a time, rows are copied whole; ``gather`` copies number by number.
    pairs = [(row, chooser) for row in range(len(x)) for chooser in range(choosers)]
    rows = [x[row, chooser // share].index_select(0, index[row, chooser]) for row, chooser in pairs]
    return torch.stack(rows).view(len(x), choosers, -1, x.shape[3])
