"""The state of kernel attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.core.crossing import Crossing


class KernelState(NamedTuple):
    """The state of kernel attention; a leaf that the config does not use has no elements.

    kv: [batch, heads, features, value_dim]; z: [batch, heads, features], the normaliser's sum; recent: [batch,
    key_heads, convolution - 1, channels], projected tokens; maximum: [batch, key_heads] int64
    (``kernels.linear.running``); seen: [batch] int64, for positions and the maximum.
    """

    kv: Tensor
    z: Tensor
    recent: Tensor
    maximum: Tensor
    seen: Tensor

    def after_row(self, crossing: Crossing) -> KernelState:
        """Return the state after the row, where this one is that of a stretch except for kv, z and maximum."""
        recent = crossing.last(self.recent) if self.recent.numel() else self.recent
        return self._replace(recent=recent, seen=crossing.seen if self.seen.dim() == 1 else self.seen)
