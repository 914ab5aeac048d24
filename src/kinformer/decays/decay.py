"""The share of the state of kernel attention that is left at every token: the part ``decay``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core.config import Config


class Decay(nn.Module):
    """A decay; ``forward(x)`` returns its logarithms, not above 0, for inputs x [batch, time, dim] of the mixer.

    [batch, heads, time], or [batch, heads, time, features] where every feature has its own; in float32 at least.
    ``coupled``: a token enters the state as :meth:`entering` times its key. ``by_channel``: every feature has its own.
    """

    coupled: bool = False
    by_channel: bool = False

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def entering(self, log_decay: Tensor) -> Tensor:
        """Return the factors 1 - a of keys, from the result of :meth:`forward`, log a."""
        # 1 - a = -expm1(log a), exact where a is near 1
        return -torch.expm1(log_decay)


class DecayConfig(Config):
    slot = "decay"

    def build(self, dim: int, num_heads: int, features: int) -> Decay:
        """Build the decay for inputs of width ``dim`` and heads of ``features`` features."""
        raise NotImplementedError
