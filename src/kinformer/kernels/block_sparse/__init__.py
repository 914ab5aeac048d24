"""Softmax attention over the pairs of any pattern, in time and memory that follow the number of pairs it allows."""

from __future__ import annotations

from typing import NamedTuple

from kinformer.core.pattern import Pattern
from kinformer.kernels.block_sparse import chunked, flops
from kinformer.kernels.block_sparse.plan import Interval, plan
from kinformer.kernels.block_sparse.stacking import stack

__all__ = ["Explanation", "chunked", "explain", "flops"]


class Explanation(NamedTuple):
    """The pairs of one head that are computed and attended (the mean over heads where they differ)."""

    computed: float
    attended: float

    @property
    def ratio(self) -> float:
        return self.computed / max(self.attended, 1)


def explain(pattern: Pattern, length: int, past: int = 0) -> Explanation:
    """Return how many pairs ``length`` queries after ``past`` tokens compute, and how many the pattern allows."""
    heads = [pattern.at(head) for head in range(pattern.num_heads or 1)]
    stacked = stack(pattern, Interval(0, past, past + length)) if len(heads) > 1 else None
    if stacked is not None:
        return Explanation(stacked.computed / len(heads), stacked.attended / len(heads))
    plans = [term for one in heads for term in plan(one, Interval(0, past, past + length))]
    computed, attended = (sum(getattr(term, name) for term in plans) / len(heads) for name in ("computed", "attended"))
    return Explanation(computed, attended)
