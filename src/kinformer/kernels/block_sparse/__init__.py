"""Softmax attention over the pairs of any pattern, in time and memory that follow the number of pairs it allows."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.autocast import autocast_dtype
from kinformer.core.errors import KinformerError
from kinformer.kernels.block_sparse import chunked, reference
from kinformer.kernels.block_sparse.problem import FORMS, Problem
from kinformer.kernels.softmax.geometry import Dropout

__all__ = ["FORMS", "IMPLS", "Dropout", "Problem", "block_sparse_attention"]

IMPLS = ("auto", "reference", "chunked")
_PLACE = "block-sparse attention"


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    impl: str = "auto",
) -> Tensor:
    """softmax(score(q, k)) v over the pairs that ``problem.pattern`` allows.

    q: [batch, q_heads, time, head_dim]; query i stands at slot past + i, where past = k.shape[2] - time.
    k, v: [batch, kv_heads, past + time, head_dim or head_dim_v]; query head h reads kv head
        h // (q_heads // kv_heads). Slots that nobody sees must hold finite numbers.

    Returns [batch, q_heads, time, head_dim_v] in the dtype of q (under autocast in the autocast dtype). A query that
    sees nothing gives 0. Softmax runs in float32 or better.
    """
    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if impl not in IMPLS:
        raise KinformerError(f"{_PLACE}: impl is {impl!r}, expected one of {', '.join(IMPLS)}.")
    if impl == "auto":
        impl = choose_impl(q)
    return (chunked if impl == "chunked" else reference).attend(q, k, v, problem)[0]


def choose_impl(q: Tensor) -> str:
    """The name that impl="auto" stands for: one query needs no plan."""
    return "reference" if q.shape[2] == 1 and q.device.type != "meta" else "chunked"
