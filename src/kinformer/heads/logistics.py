"""A mixture of discretised logistics over intensities (Salimans et al. 2017, PixelCNN++, equations 1 to 3).

    p(v) = sum_i w_i [F((x + h - m_i) / s_i) - F((x - h - m_i) / s_i)],    x = 2 v / (L - 1) - 1,  h = 1 / (L - 1)

F is the logistic function, L the number of levels; the bins of the lowest and the highest level have no outer end.
Where a position holds three channels, all take the same component, the means of green and blue moving with the values
that stand before them: m_g + a r, m_b + b r + c g, each coefficient the tanh of an output.

The mass of a bin is computed as F(u) F(-l) (1 - exp(l - u)), which is exact however small. The authors' code takes the
density at the middle of the bin times its width where the mass is below 1e-5; that sums to less than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from kinformer.core.head import Likelihood
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.runtime.errors import KinformerError


class Mixture(NamedTuple):
    """The parameters of a mixture: ``weights`` [..., mixtures] as logits; ``means`` and ``log_scales``
    [..., channels, mixtures]; ``coefficients`` [..., pairs, mixtures], within -1 and 1, of the pairs
    (green, red), (blue, red), (blue, green)."""

    weights: Tensor
    means: Tensor
    log_scales: Tensor
    coefficients: Tensor


class LogisticMixture(Likelihood):
    """The head hidden_states [batch, time, dim] -> parameters [batch, time, 3 * mixtures], or 10 * mixtures of three
    channels.

    ``floor``: the least logarithm of a scale.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "logistics"
        mixtures: int = 10
        floor: float = -7.0

        def __post_init__(self) -> None:
            if self.mixtures < 1:
                raise KinformerError(f"mixtures must be 1 or more, but is {self.mixtures}.")

        def check(self, dim: int, input: Input) -> None:
            if input.levels is None or input.levels < 2:
                raise KinformerError(
                    f"the head {self.kind!r} predicts intensities, which the input of this model does not know; use "
                    "the input pixels, or another head."
                )
            if input.values_per_position not in (1, 3):
                raise KinformerError(
                    f"the head {self.kind!r} predicts one value or three at a position, but the input has "
                    f"{input.values_per_position}; use images of one or three channels, or joint = false."
                )

        def build(self, dim: int, input: Input) -> LogisticMixture:
            self.check(dim, input)
            assert input.levels is not None
            return LogisticMixture(self, dim, input.levels, input.values_per_position)

    def __init__(self, config: Config, dim: int, levels: int, channels: int) -> None:
        super().__init__()
        self.config, self.levels, self.channels = config, levels, channels
        self.draws = 1 + channels
        self.pairs = channels * (channels - 1) // 2
        self.output = nn.Linear(dim, config.mixtures * (1 + 2 * channels + self.pairs))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states)

    def mixture(self, logits: Tensor) -> Mixture:
        """Return the mixture that ``logits`` [..., parameters] stand for."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts = logits.unflatten(-1, (-1, self.config.mixtures))
        weights, means, log_scales, coefficients = parts.split([1, self.channels, self.channels, self.pairs], dim=-2)
        return Mixture(weights[..., 0, :], means, log_scales.clamp_min(self.config.floor), coefficients.tanh())

    def nats(self, logits: Tensor, values: Tensor) -> Tensor:
        mixture = self.mixture(logits)
        values = values.reshape(*mixture.weights.shape[:-1], self.channels, 1)
        x = values.to(mixture.means.dtype) * (2 / (self.levels - 1)) - 1
        means = torch.stack([self._mean(mixture, channel, x) for channel in range(self.channels)], dim=-2)
        inverse, half = (-mixture.log_scales).exp(), 1 / (self.levels - 1)
        upper, lower = inverse * (x - means + half), inverse * (x - means - half)
        # ln [F(u) - F(l)] = ln F(u) + ln F(-l) + ln (1 - e^(l - u)), with u - l = 2 h / s
        inside = logsigmoid(upper) + logsigmoid(-lower) + torch.log(-torch.expm1(-2 * half * inverse))
        first, last = values == 0, values == self.levels - 1
        bins = torch.where(first, logsigmoid(upper), torch.where(last, logsigmoid(-lower), inside))
        # -ln sum_i w_i prod_c p_i(v_c): the channels of a pixel share their component.
        return -(log_softmax(mixture.weights, dim=-1) + bins.sum(-2)).logsumexp(-1)

    def draw(self, logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        """Draw a component by the first number, then each channel from its logistic, whose scale the temperature
        multiplies; at 0 return the mean of the heaviest component."""
        mixture, uniform = self.mixture(logits), uniform.to(logits.device)
        if temperature == 0:
            chosen = mixture.weights.argmax(-1, keepdim=True)
        else:
            mass = (mixture.weights.double() / temperature).softmax(-1).cumsum(-1)
            chosen = torch.searchsorted(mass, uniform[..., :1].double() * mass[..., -1:], right=True)
            chosen = chosen.clamp_max(self.config.mixtures - 1)
        one = Mixture(
            *(part.take_along_dim(chosen.unsqueeze(-2), -1) for part in (mixture.weights[..., None, :], *mixture[1:]))
        )
        u = uniform[..., 1:, None].to(one.means.dtype).clamp(1e-7, 1 - 1e-7)
        # The inverse of the logistic function, ln(u / (1 - u)), draws from a logistic of scale s.
        moved = temperature * one.log_scales.exp() * (u.log() - torch.log1p(-u))
        x, drawn = torch.zeros_like(one.means), []
        for channel in range(self.channels):
            value = ((self._mean(one, channel, x) + moved[..., channel, :] + 1) * ((self.levels - 1) / 2)).round()
            drawn.append(value.clamp(0, self.levels - 1))
            x[..., channel, :] = drawn[-1] * (2 / (self.levels - 1)) - 1
        values = torch.cat(drawn, dim=-1).long()
        return values if self.channels > 1 else values[..., 0]

    def _mean(self, mixture: Mixture, channel: int, x: Tensor) -> Tensor:
        """Return the means [..., mixtures] of ``channel`` where the channels
        before it have the intensities in ``x``."""
        mean, first = mixture.means[..., channel, :], channel * (channel - 1) // 2
        for before in range(channel):
            mean = mean + mixture.coefficients[..., first + before, :] * x[..., before, :]
        return mean
