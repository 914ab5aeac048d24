"""A stand-in for the values of tokens, by which the weights of attention are read from its outputs."""

from __future__ import annotations

import torch
from torch import Tensor


class Probe:
    """A stand-in for the values of tokens: ``first`` None gives the values themselves, -1 zeros, any other the columns
    of the identity that belong to the tokens from ``first`` on."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.parts: dict[int, Tensor] = {}

    def __call__(self, v: Tensor, at: int = 0) -> Tensor:
        """Return what stands for v [batch, heads, time, width], whose first token is the mixer's token ``at``."""
        if self.first is None:
            self.parts.setdefault(at, v)
            return v
        out = torch.zeros_like(v)
        if self.first >= 0:
            low = max(self.first, at)
            high = max(low, min(self.first + v.shape[3], at + v.shape[2]))
            index = torch.arange(low, high, device=v.device)
            out[:, :, index - at, index - self.first] = 1
        return out

    @property
    def values(self) -> Tensor:
        """Return the values [batch, heads, tokens, width] of all tokens."""
        return torch.cat([part for _, part in sorted(self.parts.items())], 2)
