"""Convolutions over tokens, and feed-forwards that look at other tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    divided,
    in_range,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.crossing import Crosses
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, GridOnly, SequenceContext, gridded
from kinformer.core.parts import FeedForwardConfig, ResidualOutput
from kinformer.core.probe import no_weights
from kinformer.parts.output_parts import CausalConvolution, convolve
from kinformer.parts.projections import shifted_sum
from kinformer.runtime.errors import KinformerError

_NO_WEIGHTS = "A convolution does not have attention: its weights are the same for every text."


class SeparableConvolution(GridOnly, EncoderMixer):
    """The separable convolution of ConvFormer (Yu et al. 2022, MetaFormer Baselines for Vision, section 2.2), no
    attention.

    y = W_2 (depthwise convolution over the grid of patches of relu(W_1 x)^2)

    The mixer reads the patches of images, row by row. ``kernel``: patches on a side, an odd number; beyond the image
    there are zeros. ``expansion``: the width of the convolved vectors in widths of a token.
    """

    lacks_global = "the mixer separable_convolution reads the patches of images alone"

    class Config(EncoderMixerConfig):
        kind = "separable_convolution"
        LEAST = {"expansion": 1}
        kernel: int = 7
        expansion: int = 2
        bias: bool = False

        def __post_init__(self) -> None:
            if self.kernel < 1 or self.kernel % 2 == 0:
                raise KinformerError(f"kernel must be an odd number of 1 or more, but is {self.kernel}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        width = config.expansion * dim
        self.up = nn.Linear(dim, width, bias=config.bias)
        self.depthwise = nn.Conv2d(
            width, width, config.kernel, padding=config.kernel // 2, groups=width, bias=config.bias
        )
        self.down = ResidualOutput(width, dim, bias=config.bias)

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        no_weights(_NO_WEIGHTS)
        rows, columns = gridded(x, context, "separable_convolution")
        # relu(W_1 x)^2 as an image [batch, channels, rows, columns]
        x = self.up(x).relu().square().unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
        return self.down(self.depthwise(x).permute(0, 2, 3, 1).flatten(1, 2))


# The separable convolution in place of the feed-forward of a Universal Transformer.


class SeparableTransition(FeedForwardConfig):
    """The separable convolution between steps of a Universal Transformer, for its feed-forward (Dehghani et al. 2019,
    section 2.1; Chollet 2017; as in tensor2tensor).

        y = W_2 C_2 relu(W_1 C_1 x),    (C x)_t = sum_s c_s * x_(t - s),    a weight c_s for every channel

    C_1 and C_2 are as wide as ``first_kernel`` and ``second_kernel``, odd numbers of tokens. In an encoder they look
    equally far back and ahead. In a decoder they look back only, and the state holds the last inputs of both. Beyond
    both ends there are zeros. ``hidden_dim`` is the width between the two convolutions.
    """

    kind = "separable_convolution"
    hidden_dim: int | None = None
    first_kernel: int = 3
    second_kernel: int = 5

    def __post_init__(self) -> None:
        for name in ("first_kernel", "second_kernel"):
            if (kernel := getattr(self, name)) < 1 or kernel % 2 == 0:
                raise KinformerError(f"{name} must be an odd number of 1 or more, but is {kernel}.")

    def build(self, dim: int) -> TwoSidedConvolution:
        return TwoSidedConvolution(self, dim)

    def build_causal(self, dim: int) -> CausalTransition:
        return CausalTransition(self, dim)


class _Weights(nn.Module):
    """The weights: ``first`` and ``second`` are the convolutions of every channel, ``up``
    and ``down`` the products after them."""

    def __init__(self, config: SeparableTransition, dim: int) -> None:
        super().__init__()
        self.dim = dim
        hidden_dim = config.hidden_dim or 4 * dim
        self.first = CausalConvolution(config.first_kernel, 1, dim)
        self.second = CausalConvolution(config.second_kernel, 1, hidden_dim)
        self.up, self.down = nn.Linear(dim, hidden_dim), ResidualOutput(hidden_dim, dim)


class TwoSidedConvolution(_Weights, EncoderMixer):
    """The two-sided form for encoders: x [batch, time, dim] of a sequence -> y of the same shape."""

    lacks_global = "a separable convolution is of neighbours, and a global input has none"

    def check(self, global_tokens: bool, global_input: bool) -> None:
        super().check(False, global_input)

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        no_weights(_NO_WEIGHTS)
        hidden = self.up(_centred(self.first, select_valid(x, context.valid))).relu()
        return select_valid(self.down(_centred(self.second, select_valid(hidden, context.valid))), context.valid)


def _centred(convolution: CausalConvolution, x: Tensor) -> Tensor:
    """Return the convolution of x [batch, time, channels] with as many zeros before it as behind."""
    side = convolution.context // 2
    return shifted_sum(pad(x, (0, 0, side, side))[:, None], convolution.weight, None)[:, 0]


class ConvolutionState(NamedTuple):
    """The last inputs of either convolution, zero before a sequence: [batch, 1, kernel - 1, channels]."""

    first: Tensor
    second: Tensor


class CausalTransition(_Weights, CausalMixer):
    """The causal form: x [batch, time, dim] -> y [batch, time, dim], from a token and those before it."""

    growth = "constant"

    def like(self) -> Tensor:
        return self.down.weight

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> ConvolutionState:
        dtype = state_dtype(dtype)
        return ConvolutionState(*(torch.zeros(batch, 1, *size, device=device, dtype=dtype) for size in self._sizes))

    @property
    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.first.context, self.up.in_features), (self.second.context, self.up.out_features)

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return sum(tokens * channels for tokens, channels in self._sizes) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: ConvolutionState) -> tuple[Tensor, ConvolutionState]:
        no_weights(_NO_WEIGHTS)
        valid, reset = chunk.valid, real_resets(chunk)
        mixed, first = self.first(select_valid(chunk.x, valid)[:, None], state.first, valid, reset)
        hidden = select_valid(self.up(mixed[:, 0]).relu(), valid)
        mixed, second = self.second(hidden[:, None], state.second, valid, reset)
        return select_valid(self.down(mixed[:, 0]), valid), ConvolutionState(first, second)


# RWKV's channel mixing.

SHIFT = 0.0625
"""How mu begins: 1 - (channel / dim)^p, as in a middle layer of the authors' models."""


class ChannelMix(FeedForwardConfig):
    """RWKV's channel mixing: a feed-forward with squared ReLU after a token shift (Peng et al. 2025, RWKV-7, section
    4), for decoders.

        x' = x_t + mu * (x_(t-1) - x_t),    y = W_v relu(W_k x')^2

    Every channel has a mu. The token before the first token is zero. The state holds the last token. Both products are
    without a bias.
    """

    kind = "channel_mix"
    hidden_dim: int | None = None

    def part(self, dim: int, parts: int) -> ChannelMix:
        return self.replace(hidden_dim=divided(self, "hidden_dim", self.hidden_dim or 4 * dim, parts))

    def build(self, dim: int) -> CausalChannelMix:
        raise KinformerError(
            "the feed-forward 'channel_mix' looks at the token before, which in this layer none may; use it in the "
            "layer 'decoder' of a decoder, or mlp here."
        )

    def build_causal(self, dim: int) -> CausalChannelMix:
        return CausalChannelMix(self, dim)


class ShiftState(NamedTuple):
    """The last tokens [batch, 1, tokens, dim], zero before a sequence; one token of RWKV's channel mixing."""

    recent: Tensor


class HoldsTokens(Crosses, CausalMixer):
    """A mixer x [batch, time, dim] -> y [batch, time, dim] whose state holds the last ``context`` tokens."""

    context: int = 1

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> ShiftState:
        return ShiftState(torch.zeros(batch, 1, self.context, self.dim, device=device, dtype=state_dtype(dtype)))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.context * self.dim * state_dtype(dtype).itemsize


class CausalChannelMix(HoldsTokens):
    """The feed-forward from a token and the one before it. ``shift`` [dim] is mu, ``up`` and ``down`` are W_k and
    W_v."""

    def __init__(self, config: ChannelMix, dim: int) -> None:
        super().__init__()
        self.dim = dim
        hidden_dim = config.hidden_dim or 4 * dim
        self.shift = nn.Parameter(1 - (torch.arange(dim) / dim) ** SHIFT)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = ResidualOutput(hidden_dim, dim, bias=False)

    def like(self) -> Tensor:
        return self.down.weight

    def forward(self, chunk: Chunk, state: ShiftState) -> tuple[Tensor, ShiftState]:
        no_weights(
            "A token shift does not have attention: it mixes every token with the one before in the same shares."
        )
        x = select_valid(chunk.x, chunk.valid)[:, None]
        weight = torch.stack([1 - self.shift, self.shift])[:, None]
        shifted, recent = self.convolved(partial(convolve, weight), x, state.recent, chunk, real_resets(chunk))
        return select_valid(self.down(self.up(shifted[:, 0]).relu().square()), chunk.valid), ShiftState(recent)


class GatedConvolution(HoldsTokens):
    """The gated short convolution of LFM2 (Liquid AI 2025, LFM2 Technical Report), no attention.

        b, c, v = W_in x_t,    y = W_out (c * (C u)_t),    u_t = b * v,    (C u)_t = sum_s w_s * u_(t - s)

    Every channel has its own weights w_s. ``width``: the tokens that C spans, the token itself among them. The state
    holds u of the last width - 1 tokens.
    """

    class Config(MixerConfig):
        kind = "gated_convolution"
        LEAST = {"width": 2}
        width: int = 3

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config, self.context = dim, config, config.width - 1
        self.products = nn.Linear(dim, 3 * dim, bias=False)
        self.convolution = CausalConvolution(config.width, 1, dim)
        self.out = ResidualOutput(dim, dim, bias=False)

    def forward(self, chunk: Chunk, state: ShiftState) -> tuple[Tensor, ShiftState]:
        no_weights(_NO_WEIGHTS)
        b, c, v = self.products(select_valid(chunk.x, chunk.valid)).chunk(3, dim=-1)
        tokens = in_range(b) * in_range(v)
        mixed, recent = self.convolved(self.convolution, tokens[:, None], state.recent, chunk, real_resets(chunk))
        return select_valid(self.out((c * mixed[:, 0]).to(c.dtype)), chunk.valid), ShiftState(recent)


PARTS = {
    "GatedConvolution": GatedConvolution.Config,
    "SeparableConvolution": SeparableConvolution.Config,
    "SeparableTransition": SeparableTransition,
    "ChannelMix": ChannelMix,
}
