"""Softmax attention over the pairs of any pattern, in time and memory that follow the number of pairs it allows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.core.autocast import autocast_together
from kinformer.core.errors import KinformerError
from kinformer.core.pattern import Pattern
from kinformer.kernels.block_sparse import chunked, flops, reference, single
from kinformer.kernels.block_sparse.chunked import column_sums
from kinformer.kernels.block_sparse.plan import Interval, plan
from kinformer.kernels.block_sparse.problem import FORMS, Problem
from kinformer.kernels.block_sparse.stack import stack
from kinformer.kernels.softmax.geometry import Dropout

__all__ = [
    "FORMS",
    "IMPLS",
    "Dropout",
    "Problem",
    "block_sparse_attention",
    "block_sparse_attention_lse",
    "choose_impl",
    "column_sums",
    "explain",
    "flops",
]

IMPLS = ("auto", "reference", "chunked", "flex")
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
    q, k, v = autocast_together(q, k, v)
    if impl not in IMPLS:
        raise KinformerError(f"{_PLACE}: impl is {impl!r}, expected one of {', '.join(IMPLS)}.")
    if impl == "auto":
        impl = choose_impl(q, problem)
    if impl == "single":
        return single.attend(q, k, v, problem)
    if impl == "flex":
        from kinformer.kernels.block_sparse import flex

        return flex.attend(q, k, v, problem)[0]
    return (chunked if impl == "chunked" else reference).attend(q, k, v, problem)[0]


def block_sparse_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """:func:`block_sparse_attention` and its log-sum-exp [batch, q_heads, time], both differentiable: in float32 or
    better, -inf where a query sees nothing, untouched by dropout. ``impl``: auto, chunked or reference."""
    q, k, v = autocast_together(q, k, v)
    if impl in ("auto", "chunked"):
        return chunked.attend(q, k, v, problem)
    if impl == "reference":
        return reference.attend(q, k, v, problem)
    raise KinformerError(f"{_PLACE} with lse: impl is {impl!r}, expected auto, chunked or reference.")


class Explanation(NamedTuple):
    """Pairs of one head (the mean over heads where they differ)."""

    computed: float
    attended: float

    @property
    def ratio(self) -> float:
        return self.computed / max(self.attended, 1)


def explain(pattern: Pattern, length: int, past: int = 0) -> Explanation:
    """How many pairs ``length`` queries after ``past`` tokens compute, and how many of them the pattern allows."""
    heads = [pattern.at(head) for head in range(pattern.num_heads or 1)]
    stacked = stack(pattern, Interval(0, past, past + length)) if len(heads) > 1 else None
    if stacked is not None:
        return Explanation(stacked.computed / len(heads), stacked.attended / len(heads))
    parts = [part for one in heads for part in plan(one, Interval(0, past, past + length))]
    computed, attended = (sum(getattr(part, name) for part in parts) / len(heads) for name in ("computed", "attended"))
    return Explanation(computed, attended)


def choose_impl(q: Tensor, problem: Problem) -> str:
    """The name that impl="auto" stands for: one query needs no plan."""
    return "single" if q.shape[2] == 1 and problem.dropout is None and q.device.type != "meta" else "chunked"
