"""The summary of a chunk for linear attention, which needs no state to apply it to: S <- a S + s, z <- a z + z_chunk.

Summaries compose, and composing is associative, so that chunks of one sequence may be summarised apart (on other ranks,
in a tree) and joined afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.kernels.linear.blocks import accumulator_dtype
from kinformer.kernels.linear.sequence import LinearState
from kinformer.runtime.autocast import no_autocast


class LinearSummary(NamedTuple):
    """The effect of a chunk: ``a`` [batch, heads, features or 1] is left of the state; ``s`` and ``z``,
    shaped like LinearState's, are added."""

    a: Tensor
    s: Tensor
    z: Tensor

    def then(self, later: LinearSummary) -> LinearSummary:
        """The summary of this chunk and a ``later`` one, next to it."""
        return LinearSummary(self.a * later.a, *later.after(LinearState(self.s, self.z)))

    def after(self, state: LinearState) -> LinearState:
        """The state after the chunk, from that before it."""
        return LinearState(self.a.unsqueeze(-1) * state.s + self.s, self.a * state.z + self.z)


def summarise(k: Tensor, v: Tensor, *, log_decay: Tensor | None = None, reset: Tensor | None = None) -> LinearSummary:
    """The summary of a chunk; arguments as for ``linear_attention``. One product of 2 time features head_dim FLOPs."""
    dtype = accumulator_dtype(k, v)
    k, v = k.to(dtype), v.to(dtype)
    left = k.new_ones(*k.shape[:2], 1)
    if log_decay is not None:
        sums = (log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)).to(dtype).flip(2).cumsum(2).flip(2)
        left = sums[:, :, 0].exp()
        k = k * functional.pad(sums[:, :, 1:], (0, 0, 0, 1)).exp()  # of the decays behind each token
    if reset is not None:
        begun = reset.long().cumsum(1)
        k = torch.where((begun == begun[:, -1:])[:, None, :, None], k, k.new_zeros(()))
        left = left.masked_fill(begun[:, None, -1:] > 0, 0)
    with no_autocast(k.device):
        return LinearSummary(left, k.mT @ v, k.sum(2))
