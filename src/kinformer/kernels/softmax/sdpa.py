"""Exact softmax attention by torch's ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kinformer.core.errors import KinformerError
from kinformer.kernels.softmax.geometry import Problem, visible


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
    behind, ahead = span.limits(time, past)
    mask, causal = None, False
    if reach is None and behind >= past + time - 1 and ahead >= time - 1:
        pass
    elif reach is None and behind >= past + time - 1 and ahead == 0 and past == 0:
        causal = True
    else:
        mask = visible(time, range(first, end), past, span, reach, q.device)
    if end - first < k.shape[2]:
        k, v = k[:, :, first:end], v[:, :, first:end]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
