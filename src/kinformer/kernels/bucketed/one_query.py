"""Bucketed attention of one query per row and head: gather the keys that it sees and attend to those alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import state_dtype
from kinformer.kernels.bucketed.layout import gathered
from kinformer.kernels.bucketed.membership import Membership
from kinformer.kernels.softmax.request import Attended
from kinformer.runtime.autocast import no_autocast


def attend_one(q: Tensor, k: Tensor, v: Tensor, membership: Membership, scale: float, itself: bool) -> Attended:
    """Attend from one query; arguments and result as for ``bucketed_attention``."""
    runs, ranks, size = membership.runs, membership.ranks, membership.size
    last_run, rank, slots = runs[..., -1:], ranks[..., -1:], runs.shape[3]
    seen = ((runs == last_run) & (last_run >= 0) & (ranks // size >= rank // size - 1)).any(2)
    if not itself:
        seen = seen & (torch.arange(slots, device=q.device) < slots - 1)
    # A round shows two chunks at most, so the keys seen in any round fit into so many slots.
    most = 2 * size * runs.shape[2]
    if most < slots:
        seen, index = seen.to(torch.uint8).topk(most, dim=2)
        seen = seen > 0
        k, v = (gathered(x, index) for x in (k, v))
    wide = state_dtype(q.dtype)
    blind = ~seen.any(-1, keepdim=True)
    with no_autocast(q.device):
        scores = (k.to(wide) @ q.to(wide).mT * scale).squeeze(-1)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0)
    weights = scores.softmax(-1).masked_fill(blind, 0).unsqueeze(2)
    lse = scores.logsumexp(-1, keepdim=True).masked_fill(blind, -torch.inf)
    return Attended((weights @ v.to(wide)).to(v.dtype), lse)
