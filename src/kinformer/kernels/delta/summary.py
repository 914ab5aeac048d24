"""The summary of a chunk for the delta rule, which needs no memory to apply it to: W <- a W + b, a being a matrix.

Summaries compose, and composing is associative, so that chunks of one sequence may be summarised apart (on other ranks,
in a tree) and joined afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.kernels.delta.chunked import chunked
from kinformer.kernels.linear.blocks import accumulator_dtype


class DeltaSummary(NamedTuple):
    """The effect of a chunk: ``a`` [batch, heads, features, features] is left of the memory;
    ``b`` [.., features, head_dim] is added."""

    a: Tensor
    b: Tensor

    def then(self, later: DeltaSummary) -> DeltaSummary:
        """The summary of this chunk and a ``later`` one, next to it."""
        return DeltaSummary(later.a @ self.a, later.after(self.b))

    def after(self, state: Tensor) -> Tensor:
        """Return W after the chunk, from W before it."""
        return self.a @ state + self.b


def summarise(
    k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor | None = None, reset: Tensor | None = None
) -> DeltaSummary:
    """The summary of a chunk; arguments as for ``delta_rule``.

    The rule is linear in W and v, so a is what becomes of the identity when nothing is written. Both are made in one
    run of the chunked rule, with features + head_dim columns.
    """
    dtype, features = accumulator_dtype(k, v), k.shape[-1]
    # Columns [0, V] with initial state [I, 0]: the first half ends as a, the second as b.
    nothing = functional.pad(v, (features, 0))
    start = torch.eye(features, dtype=dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    _, state = chunked(k, k, nothing, beta, functional.pad(start, (0, v.shape[-1])), log_decay, reset)
    return DeltaSummary(*state.split([features, v.shape[-1]], dim=-1))
