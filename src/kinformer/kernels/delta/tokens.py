"""The arguments of the delta rule's kernels: the tokens of a chunk."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaTokens(NamedTuple):
    """The tokens of a chunk, in the shapes of ``delta_rule``.

    ``erase``: the keys under which the memory is read, and so erased, shaped like k; None: k itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    erase: Tensor | None = None
    log_decay: Tensor | None = None
    reset: Tensor | None = None

    def part(self, batch: slice, time: slice) -> DeltaTokens:
        """Return the rows ``batch`` and the tokens ``time`` of the chunk."""
        at = batch, slice(None), time
        q, k, v, beta, erase, decay = (None if x is None else x[at] for x in self[:6])
        reset = None if self.reset is None else self.reset[batch, time]
        return DeltaTokens(q, k, v, beta, erase, decay, reset)  # type: ignore[arg-type]
