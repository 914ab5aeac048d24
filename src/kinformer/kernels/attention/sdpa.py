"""Softmax attention by torch's ``scaled_dot_product_attention``: bands and sets, with a dense mask where need be.

out = softmax(scale * Q K^T + mask) V
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kinformer.kernels.band.tiles import interval, limits
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility

Expressed = Literal["all", "causal", "masked"]


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, time, head_dim_v]; a query that sees nothing gives 0.

    torch aligns ``is_causal`` to the first slot, so it stands for our causal band only where there is no past.
    """
    time, slots = q.shape[2], k.shape[2]
    first, end = (0, slots) if visibility.pattern is None else interval(visibility, time, slots)
    how = expressed(visibility, time, slots)
    mask = _mask(visibility, q, first, end, slots) if how == "masked" else None
    if end - first < slots:
        k, v = k[:, :, first:end], v[:, :, first:end]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=how == "causal",
        scale=scoring.scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )
    return Attended(out)


def expressed(visibility: Visibility, time: int, slots: int) -> Expressed:
    """Return how PyTorch's kernel expresses who sees whom: "all", "causal" or,
    by a dense mask over all pairs, "masked"."""
    if visibility.key_padding_mask is not None:
        return "masked"
    if visibility.pattern is None:
        return "all"
    behind, ahead = limits(visibility, time, slots)
    if not visibility.whole and visibility.positions is not None:
        return "masked"
    if time == 1 and ahead >= 0 and behind >= 0:
        return "all"
    if behind < slots - 1:
        return "masked"
    if ahead >= time - 1:
        return "all"
    # ``is_causal`` aligns query 0 to slot 0, which is our band only if there is no past.
    return "causal" if ahead == 0 and time == slots else "masked"


def _mask(visibility: Visibility, q: Tensor, first: int, end: int, slots: int) -> Tensor:
    """Return whether a query may see a slot, [batch or 1, 1, time or 1, end - first] bool."""
    if visibility.pattern is None:
        assert visibility.key_padding_mask is not None
        return ~visibility.key_padding_mask[:, None, None]
    time = q.shape[2]
    behind, ahead = limits(visibility, time, slots)
    query = slots - time + torch.arange(time, device=q.device)
    distance = query[:, None] - torch.arange(first, end, device=q.device)
    seen = ((distance <= behind) & (distance >= -ahead))[None, None]
    if not visibility.whole and visibility.positions is not None:
        seen = seen & (distance <= visibility.positions[:, None, :, None])
    if visibility.key_padding_mask is not None:
        seen = seen & ~visibility.key_padding_mask[:, None, None, first:end]
    return seen
