"""The arguments of linear attention's kernels: the tokens of a chunk, and the state before it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearState(NamedTuple):
    """The sums over all tokens seen, in float32 or wider (the accumulators of the inputs' dtype).

    s: [batch, heads, features, head_dim], the sum of k v^T; z: [batch, heads, features], the sum of k.
    """

    s: Tensor
    z: Tensor


class LinearSequence(NamedTuple):
    """The arguments of ``linear_attention``, in its shapes; ``eps`` is the normaliser's."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    eps: float | None
    reset: Tensor | None

    def part(self, batch: slice, time: slice) -> LinearSequence:
        """Return the rows ``batch`` and the tokens ``time`` of the sequence."""
        at = batch, slice(None), time
        q, k, v = self.q[at], self.k[at], self.v[at]
        decay = None if self.log_decay is None else self.log_decay[at]
        return LinearSequence(q, k, v, decay, self.eps, None if self.reset is None else self.reset[batch, time])
