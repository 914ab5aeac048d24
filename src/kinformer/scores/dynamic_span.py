"""Dynamic attention span (Sukhbaatar et al. 2019, section 2.2): how far a head looks back follows from the token.

    z_t = S sigmoid(v^T x_t + b),   m_t(x) = clamp((R + z_t - x) / R, 0, 1),   a_tr = m_t(x) exp(s_tr) / sum
    bounded:   z_t = S sigmoid(v^T x_t / rms(x_t) + b)  <=  S sigmoid(sqrt(dim) |v| + b)

with the longest span S, the ramp R, and v and b of each head; x = distance - 1, as of ``soft_span``. v begins at 0, and
b so that all spans begin as the share ``initial`` of S. A span costs ``penalty`` times its mean over heads, as a mean
over tokens, by the state's ``aux``. What is computed follows the tokens' spans, tile by tile
(``kernels.attention.spans``). A later token may look back S tokens, whatever the tokens before looked at, so that the
state holds as many; with ``bounded`` no token can look farther than the weights let it, and the state is cut to that.
``state_penalty`` is the price of that bound, as a mean over heads, added up over the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid, state_dtype
from kinformer.core.learning import Regularized
from kinformer.core.span import Cut, Following, TokenSpan, host
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.sharding import gathered
from kinformer.scores.soft_span import SoftSpan, log_clamped, window

_ROUNDING = 1.0001  # of spans that are computed in float32
_EPS = 1e-12


class DynamicSpan(Following, TokenSpan, Regularized):
    """The span of each token; ``weight`` [heads, dim] and ``bias`` [heads] are v and b."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftSpan.Config):
        kind = "dynamic_span"
        initial: float = 0.018  # share of max_span: b = -4
        bounded: bool = False
        state_penalty: float = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.state_penalty < math.inf:
                raise KinformerError(f"state_penalty must be 0 or more, but is {self.state_penalty:g}.")
            if self.state_penalty and not self.bounded:
                raise KinformerError(
                    f"state_penalty is {self.state_penalty:g}, the price of the farthest that any token may look, but "
                    "spans have no such bound; add `set` span.bounded=true, or leave it out."
                )
            if not 0 < self.initial < 1:
                raise KinformerError(f"initial must lie between 0 and 1, but is {self.initial:g}.")

        def build(self, dim: int, num_heads: int, cut: Cut) -> DynamicSpan:  # type: ignore[override]
            return DynamicSpan(self, dim, num_heads, cut)

    def __init__(self, config: Config, dim: int, num_heads: int, cut: Cut) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(num_heads, dim))
        self.bias = nn.Parameter(torch.full((num_heads,), math.log(config.initial / (1 - config.initial))))
        longest = window(config, config.initial * config.max_span * _ROUNDING) if config.bounded else config.max_span
        self.follow(cut, ("weight", "bias") if config.bounded else (), (longest,) * num_heads)

    def windows_of(self, *values: Tensor) -> tuple[int, ...]:
        return tuple(window(self.config, z * _ROUNDING) for z in host(self._longest(*values)))

    def of(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        x = x.to(dtype)
        if self.config.bounded:
            x = x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        spans = x @ self.weight.to(dtype).mT + self.bias.to(dtype)
        return self.config.max_span * spans.sigmoid().transpose(1, 2)

    def penalty(self) -> Tensor:
        if not self.config.state_penalty:
            return torch.zeros((), device=self.bias.device)
        return self.config.state_penalty * self._longest(gathered(self.weight), gathered(self.bias)).mean()

    @torch.no_grad()
    def constrain(self) -> None:
        if self.config.bounded:
            self.trim(gathered(self.weight), gathered(self.bias))

    def _longest(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the longest span [heads] that the weights give any token."""
        dtype = state_dtype(weight.dtype)
        norms = torch.linalg.vector_norm(weight.to(dtype), dim=1)
        return self.config.max_span * (math.sqrt(weight.shape[1]) * norms + bias.to(dtype)).sigmoid()

    def reach(self, z: float) -> int:
        return window(self.config, z)

    def log_mask(self, z: Tensor, distance: Tensor) -> Tensor:
        # As log_mask of soft_span, in one pass less over pairs: quotients are of spans and of distances.
        return log_clamped((z / self.config.ramp + 1) - (distance - 1).to(z.dtype) / self.config.ramp)

    def cost(self, z: Tensor, valid: Tensor | None) -> Tensor:
        return self.config.penalty * select_valid(z.mean(1), valid).sum(1)
