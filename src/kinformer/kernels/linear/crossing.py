"""Linear attention over stretches of time that several processes have (``core.crossing``; LASP-2, Sun et al. 2025).

S_before = what the summaries of earlier stretches make of S,    out = linear attention after S_before
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.crossing import Crossing
from kinformer.kernels.impls import LinearImpl
from kinformer.kernels.linear import linear_attention, summarise
from kinformer.kernels.linear.sequence import LinearSequence, LinearState


class _Columns(NamedTuple):
    """A :class:`LinearSummary` whose normaliser, if any, is one more column of ``s``: S <- a S + s."""

    a: Tensor
    s: Tensor

    def after(self, state: Tensor) -> Tensor:
        return self.a.unsqueeze(-1) * state + self.s


def linear_across(
    sequence: LinearSequence, state: LinearState, impl: LinearImpl, crossing: Crossing | None
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk as ``linear_attention`` does; it is one stretch of the row where there is a ``crossing``."""
    q, k, v, log_decay, eps, reset = sequence
    after = state
    if crossing is not None:
        total = summarise(k, v, log_decay=log_decay, reset=reset)
        if eps is None:  # nobody reads z
            before, last = crossing.composed(_Columns(total.a, total.s), state.s)
            state, after = LinearState(before, state.z), LinearState(last, state.z)
        else:
            columns = _Columns(total.a, torch.cat([total.s, total.z.unsqueeze(-1)], dim=-1))
            both = crossing.composed(columns, torch.cat([state.s, state.z.unsqueeze(-1)], dim=-1))
            state, after = (LinearState(sums[..., :-1], sums[..., -1]) for sums in both)
    y, alone = linear_attention(q, k, v, state, log_decay=log_decay, eps=eps, reset=reset, impl=impl)
    return y, alone if crossing is None else after


def sums_across(k: Tensor, z: Tensor, reset: Tensor | None, crossing: Crossing) -> tuple[Tensor, Tensor]:
    """Return the sums of keys [batch, heads, features] before this stretch and after the row, from ``z``, those before
    the row, and this stretch's k [batch, heads, time, features]."""
    total = summarise(k, k[..., :0], reset=reset)
    before, after = crossing.composed(_Columns(total.a, total.z.unsqueeze(-1)), z.unsqueeze(-1))
    return before[..., 0], after[..., 0]
