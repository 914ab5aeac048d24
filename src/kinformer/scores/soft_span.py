"""Adaptive attention span (Sukhbaatar et al. 2019, "Adaptive Attention Span in Transformers", section 2.2).

    m(x) = clamp((R + z - x) / R, 0, 1),    a_tr = m(x) exp(s_tr) / sum_q m(x') exp(s_tq)

with one learnt span z = max_span * span per head and the ramp R; x = distance - 1 is 0 for the token before, as in the
authors' code, and no token sees itself. The mask is a bias log m of the scores. Distances whose mask is 0 are cut off,
rounded up as the authors do, to max_span less a multiple of ``multiple``. Spans cost ``penalty`` times the mean of z
over the heads, added up over the layers, and are brought back to 0 ... max_span after every update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import state_dtype
from kinformer.core.learning import Regularized
from kinformer.core.span import Cut, Following, Span, SpanConfig, host
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.sharding import gathered


class SoftSpan(Following, Span, Regularized):
    """The span of each head; ``span`` [heads] is its learnt share of ``max_span``, from 0 to 1."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SpanConfig):
        kind = "soft_span"
        max_span: int = 1024
        ramp: int = 32
        initial: float = 0.0  # share of max_span
        penalty: float = 2e-6
        multiple: int = 64

        def __post_init__(self) -> None:
            for name in ("max_span", "ramp", "multiple"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 token or more, but is {getattr(self, name)}.")
            if not 0 <= self.initial <= 1:
                raise KinformerError(f"initial is a share of max_span, from 0 to 1, but is {self.initial:g}.")
            if not 0 <= self.penalty < math.inf:
                raise KinformerError(f"penalty must be 0 or more, but is {self.penalty:g}.")

        def build(self, dim: int, num_heads: int, cut: Cut) -> SoftSpan:
            return SoftSpan(self, num_heads, cut)

    def __init__(self, config: Config, num_heads: int, cut: Cut) -> None:
        super().__init__()
        self.config = config
        self.span = nn.Parameter(torch.full((num_heads,), float(config.initial)))
        beginning = self._tokens(torch.tensor([config.initial], device="cpu"))  # rounded as the weights are
        self.follow(cut, ("span",), (window(config, beginning.item()),) * num_heads)

    def windows_of(self, *values: Tensor) -> tuple[int, ...]:
        return tuple(window(self.config, z) for z in host(self._tokens(values[0])))

    def spans(self) -> list[float]:
        return host(self._tokens(gathered(self.span)))

    def bias(self, farthest: int) -> Tensor:
        z = self._tokens(self.span)[:, None]
        return log_mask(z, torch.arange(farthest, device=z.device), self.config.ramp)

    def penalty(self) -> Tensor:
        return self.config.penalty * self._tokens(gathered(self.span)).mean()

    @torch.no_grad()
    def constrain(self) -> None:
        self.span.clamp_(0, 1)
        self.trim(gathered(self.span))

    def measures(self) -> dict[str, float]:
        spans = self.spans()
        return {"mean_span": sum(spans) / len(spans)}

    def _tokens(self, span: Tensor) -> Tensor:
        """Return spans in tokens. The bounds hold here, too, for weights that no trainer has clamped."""
        span = span.to(state_dtype(span.dtype))
        # Not `clamp`, whose gradient at a bound is 0 from PyTorch 2.14 on: a span at a bound would never leave it.
        return span.masked_fill(span < 0, 0).masked_fill(span > 1, 1) * self.config.max_span


def log_mask(z: Tensor, x: Tensor, ramp: int) -> Tensor:
    """Return log m(x) of spans z, -inf where the mask is 0."""
    return log_clamped((ramp + z - x) / ramp)


def log_clamped(mask: Tensor) -> Tensor:
    """Return log clamp(mask, 0, 1), -inf where the mask is 0 or less; a mask of exactly 1 has the gradient of log."""
    hidden = mask <= 0
    # Not `clamp`, whose gradient at a bound is 0 from PyTorch 2.14 on: spans that begin as 0 would not learn at x = 0.
    # log 0 = -inf has an infinite slope, which times 0 is NaN: the 0 is filled before the logarithm, and after it.
    return mask.masked_fill(hidden | (mask > 1), 1).log().masked_fill(hidden, -math.inf)


def window(config: SoftSpan.Config, z: float) -> int:
    """Return how many tokens back a head of the span z sees, rounded up as the authors do."""
    size = min(config.max_span, math.ceil(z) + config.ramp)
    return config.max_span - (config.max_span - size) // config.multiple * config.multiple
