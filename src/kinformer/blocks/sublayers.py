"""What layers of a mixer and a feed-forward share: each sublayer in a residual branch with its own norm.

    pre-norm    x + F(norm(x))       (Xiong et al. 2020; needs a final norm after the stack)
    post-norm   norm(x + F(x))       (Vaswani et al. 2017; needs a warm-up)

Dropout falls on F's output, before the residual sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kinformer.core.errors import KinformerError


class Sublayers(nn.Module):
    """``config`` has feed_forward, norm, wiring ("pre" or "post") and dropout; ``mixer`` is built."""

    def __init__(self, config: Any, mixer: nn.Module, dim: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.feed_forward = config.feed_forward.build(dim)
        self.mixer_norm = config.norm.build(dim)
        self.feed_forward_norm = config.norm.build(dim)
        self.pre = config.wiring == "pre"
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None

    def _fed(
        self, x: Tensor, valid: Tensor | None, feed_forward: nn.Module, norm: nn.Module, share: float = 1.0
    ) -> Tensor:
        y = norm(x) if self.pre else x
        y = feed_forward(y, valid) if getattr(feed_forward, "masked", False) else feed_forward(y)
        return self._added(x, y, norm, share)

    def _added(self, x: Tensor, y: Tensor, norm: nn.Module, share: float = 1.0) -> Tensor:
        y = y if self.dropout is None else self.dropout(y)
        x = x + y if share == 1 else torch.add(x, y, alpha=share)
        return x if self.pre else norm(x)


def check_dropout(dropout: float) -> None:
    """Refuse a share of dropped numbers that is none."""
    if not 0.0 <= dropout < 1.0:
        raise KinformerError(f"dropout must be at least 0 and below 1, but is {dropout}.")
