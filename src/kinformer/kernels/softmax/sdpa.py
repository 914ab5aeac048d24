"""Exact softmax attention by torch's ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kinformer.core.errors import KinformerError
from kinformer.kernels.softmax.geometry import Problem, Span, visible


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Output [batch, q_heads, time, head_dim_v].

    torch aligns ``is_causal`` to the first slot, so it stands for our causal span only where there is no past.

    Errors: dropout, whose mask torch draws from its own generator.
    """
    span, scale, reach, dropout = problem
    if dropout is not None:
        raise KinformerError(
            f"softmax attention: dropout p={dropout.p} with impl='sdpa' cannot repeat the mask of its seed; "
            "use impl='chunked'."
        )
    time, past = q.shape[2], k.shape[2] - q.shape[2]
    first, end = span.slots(time, past)
    how = form(q, k, span, reach)
    mask = visible(time, range(first, end), past, span, reach, q.device) if how == "masked" else None
    if end - first < k.shape[2]:
        k, v = k[:, :, first:end], v[:, :, first:end]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=how == "causal", scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def form(q: Tensor, k: Tensor, span: Span, reach: Tensor | None) -> str:
    """How torch can be told who sees whom: "all", "causal" or, with a dense mask and every pair computed, "masked"."""
    time, past = q.shape[2], k.shape[2] - q.shape[2]
    behind, ahead = span.limits(time, past)
    if reach is not None:
        return "masked"
    if time == 1 and ahead >= 0 and behind >= 0:
        return "all"
    if behind < past + time - 1:
        return "masked"
    if ahead >= time - 1:
        return "all"
    return "causal" if ahead == 0 and past == 0 else "masked"
