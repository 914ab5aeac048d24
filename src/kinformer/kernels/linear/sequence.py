"""What a chunk of tokens brings to linear attention's kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sequence(NamedTuple):
    """Arguments of ``linear_attention`` as they are there; ``eps`` is the normaliser's."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    eps: float | None
    reset: Tensor | None

    def part(self, batch: slice, time: slice) -> Sequence:
        """Some rows and tokens of it."""
        at = batch, slice(None), time
        q, k, v = self.q[at], self.k[at], self.v[at]
        decay = None if self.log_decay is None else self.log_decay[at]
        return Sequence(q, k, v, decay, self.eps, None if self.reset is None else self.reset[batch, time])
