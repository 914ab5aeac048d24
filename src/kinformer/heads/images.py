"""Heads that predict parts of images: intensities, masked patches, and colours of patches."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from kinformer.core.encoder import EncoderLayerConfig, SequenceContext
from kinformer.core.parts import Input, Likelihood
from kinformer.core.stack import HeadConfig
from kinformer.inputs.images import Patches
from kinformer.parts.positions import sinusoids
from kinformer.runtime.errors import KinformerError, plural


class Mixture(NamedTuple):
    """The parameters of a mixture: ``weights`` [..., mixtures] as logits; ``means`` and ``log_scales``
    [..., channels, mixtures]; ``coefficients`` [..., pairs, mixtures], within -1 and 1, of the pairs
    (green, red), (blue, red), (blue, green)."""

    weights: Tensor
    means: Tensor
    log_scales: Tensor
    coefficients: Tensor


class LogisticMixture(Likelihood):
    """A mixture of discretised logistics over intensities (Salimans et al. 2017, PixelCNN++, equations 1 to 3).

        p(v) = sum_i w_i [F((x + h - m_i) / s_i) - F((x - h - m_i) / s_i)],    x = 2 v / (L - 1) - 1,  h = 1 / (L - 1)

    F is the logistic function, L the number of levels; the bins of the lowest and the highest level are unbounded
    outside. If a position holds three channels, all use the same component, and the means of green and blue depend on
    the values before them: m_g + a r, m_b + b r + c g, each coefficient the tanh of an output.

    The mass of a bin is computed as F(u) F(-l) (1 - exp(l - u)), which is exact however small. The authors' code takes
    the density at the middle of the bin times its width where the mass is below 1e-5; that sums to less than one. A
    position has 3 * mixtures numbers, 10 * mixtures for three channels. ``floor``: the least logarithm of a scale.
    """

    class Config(HeadConfig):
        kind = "logistics"
        LEAST = {"mixtures": 1}
        mixtures: int = 10
        floor: float = -7.0

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
        """Return the means [..., mixtures] of ``channel``, ``x`` being the intensities of channels before it."""
        mean, first = mixture.means[..., channel, :], channel * (channel - 1) // 2
        for before in range(channel):
            mean = mean + mixture.coefficients[..., first + before, :] * x[..., before, :]
        return mean


class MaskedPatchesHead(nn.Module):
    """The head that predicts the pixels of patches hidden from the encoder (He et al. 2022, MAE, section 3).

        x = [W h_i, i seen; m, i masked] + P;    x = norm(layers(x));    pixels of patch i = V x_i + b

    The head is a small encoder over all patches: the seen patches, projected to its width, and a learned mask token m
    in place of each masked patch. P are the fixed sinusoids of a patch's row and column. The ``layers`` are ``dim``
    wide. Pixels [batch, patches, channels * patch^2] are cut by ``Patches.cut`` and normalised like the input.
    """

    class Config(HeadConfig):
        kind = "masked_patches"
        layers: tuple[EncoderLayerConfig, ...]
        dim: int = 512
        eps: float = 1e-6

        def __post_init__(self) -> None:
            if not self.layers:
                raise KinformerError("layers must hold at least one layer, but is empty.")
            if self.dim < 4 or self.dim % 4:
                raise KinformerError(
                    f"dim must be a multiple of 4, sines and cosines of rows and of columns, but is {self.dim}."
                )

        def check(self, dim: int, input: Input) -> None:
            if not isinstance(input, Patches):
                raise KinformerError(
                    "the head 'masked_patches' predicts the pixels of patches, which this model does not read; use "
                    "the input patches, or another head."
                )

        def build(self, dim: int, input: Input) -> MaskedPatchesHead:
            assert isinstance(input, Patches)
            return MaskedPatchesHead(self, dim, input.config)

    def __init__(self, config: Config, dim: int, input: Patches.Config) -> None:
        super().__init__()
        self.before, self.of_size = input.before, input.grid
        self.entrance = nn.Linear(dim, config.dim)
        self.mask = nn.Parameter(0.02 * torch.randn(config.dim))
        self.layers = nn.ModuleList(layer.build(config.dim) for layer in config.layers)
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)
        self.output = nn.Linear(config.dim, input.channels * input.patch**2)

    def forward(
        self,
        hidden_states: Tensor,
        input: Input,
        valid: Tensor | None = None,
        chosen: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the pixels of all patches of an image of ``grid`` (None: the grid of the input's size).

        chosen: int64 [batch, time], the positions of the hidden states, tokens before the patches included; None for
        all positions.
        """
        grid = grid or self.of_size
        x, count = self.entrance(hidden_states), self.before + prod(grid)
        if chosen is not None:
            masked = self.mask.to(x.dtype).expand(len(x), count, -1)
            x = masked.scatter(1, chosen[..., None].expand_as(x), x)
        elif x.shape[1] != count:
            raise KinformerError(
                f"the head 'masked_patches' is for {plural(count, 'position')}, but there are {x.shape[1]}; give "
                "images of the size of the input."
            )
        places = torch.cat([x.new_zeros(self.before, x.shape[2]), _places(grid, x.shape[2], x.device).to(x.dtype)])
        x, text = x + places, SequenceContext(grid=grid)
        for layer in self.layers:
            x = layer(x, text)
        return self.output(self.norm(x))[:, self.before :]


def _places(grid: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """Return [rows * columns, dim]: sinusoids of the column in the first half of features, of the row in the second."""
    rows, columns = (sinusoids(torch.arange(side, device=device), dim // 2) for side in grid)
    return torch.cat([columns[None].expand(grid[0], -1, -1), rows[:, None].expand(-1, grid[1], -1)], 2).flatten(0, 1)


MOST_BITS = 16
"""Bits of a colour, of all channels together."""


class PatchColoursHead(nn.Module):
    """The head that predicts the mean colour of corrupted patches (Dosovitskiy et al. 2020, ViT, appendix B.1.2).

        logits of patch i = W h_i + b,    one for each colour: 512 with 3 bits for each of 3 channels

    ``bits``: bits for each channel of a colour. ``mask`` [width]: the encoder's vector in place of a masked patch.
    """

    class Config(HeadConfig):
        kind = "patch_colours"
        bits: int = 3

        def __post_init__(self) -> None:
            if not 1 <= self.bits <= 8:
                raise KinformerError(f"bits must be 1 to 8, of each channel of a colour, but is {self.bits}.")

        def check(self, dim: int, input: Input) -> None:
            if not isinstance(input, Patches):
                raise KinformerError(
                    "the head 'patch_colours' predicts colours of patches, which this model does not read; use the "
                    "input patches, or another head."
                )
            if (bits := self.bits * input.config.channels) > MOST_BITS:
                raise KinformerError(
                    f"bits is {self.bits}: of {plural(input.config.channels, 'channel')} makes 2^{bits} colours, but "
                    f"2^{MOST_BITS} are the most; give fewer."
                )

        def build(self, dim: int, input: Input) -> PatchColoursHead:
            assert isinstance(input, Patches)
            return PatchColoursHead(self, dim, input.config)

    def __init__(self, config: Config, dim: int, input: Patches.Config) -> None:
        super().__init__()
        self.before = input.before
        self.mask = nn.Parameter(0.02 * torch.randn(dim))
        self.output = nn.Linear(dim, 2 ** (config.bits * input.channels))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        """Return the logits of all patches; the tokens before them have none."""
        return self.output(hidden_states[:, self.before :])


PARTS = {
    "LogisticMixtureHead": LogisticMixture.Config,
    "MaskedPatchesHead": MaskedPatchesHead.Config,
    "PatchColoursHead": PatchColoursHead.Config,
}
