"""Dynamic attention span (Sukhbaatar et al. 2019, section 2.2): how far a head looks back follows from the token.

    z_t = S sigmoid(v^T x_t + b),   m_t(x) = clamp((R + z_t - x) / R, 0, 1),   a_tr = m_t(x) exp(s_tr) / sum

with the longest span S, the ramp R, and v and b of each head; x = distance - 1, as of ``soft_span``. v begins at 0, and
b so that all spans begin as the share ``initial`` of S. A span costs ``penalty`` times its mean over heads, as a mean
over tokens, by the state's ``aux``. A token may look back S tokens, so that the state holds as many; what is computed
follows the tokens' spans, tile by tile (``kernels.attention.spans``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid, state_dtype
from kinformer.core.pattern import Pattern
from kinformer.core.span import Cut, TokenSpan
from kinformer.runtime.errors import KinformerError
from kinformer.scores.soft_span import SoftSpan, log_mask, window


class DynamicSpan(TokenSpan):
    """The span of each token; ``weight`` [heads, dim] and ``bias`` [heads] are v and b."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftSpan.Config):
        kind = "dynamic_span"
        initial: float = 0.018  # share of max_span: b = -4

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 < self.initial < 1:
                raise KinformerError(f"initial must lie between 0 and 1, but is {self.initial:g}.")

        def build(self, dim: int, num_heads: int, cut: Cut) -> DynamicSpan:  # type: ignore[override]
            return DynamicSpan(self, dim, num_heads, cut)

    def __init__(self, config: Config, dim: int, num_heads: int, cut: Cut) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(num_heads, dim))
        self.bias = nn.Parameter(torch.full((num_heads,), math.log(config.initial / (1 - config.initial))))
        self._windows = (config.max_span,) * num_heads
        self._pattern = cut(self._windows)

    @property
    def windows(self) -> tuple[int, ...]:
        return self._windows

    @property
    def pattern(self) -> Pattern:
        return self._pattern

    def of(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        spans = x.to(dtype) @ self.weight.to(dtype).mT + self.bias.to(dtype)
        return self.config.max_span * spans.sigmoid().transpose(1, 2)

    def reach(self, z: float) -> int:
        return window(self.config, z)

    def log_mask(self, z: Tensor, distance: Tensor) -> Tensor:
        return log_mask(z, distance - 1, self.config.ramp).masked_fill(distance < 1, -math.inf)

    def cost(self, z: Tensor, valid: Tensor | None) -> Tensor:
        return self.config.penalty * select_valid(z.mean(1), valid).sum(1)
