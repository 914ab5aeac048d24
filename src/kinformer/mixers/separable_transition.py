"""The separable convolution between steps of a Universal Transformer, for its feed-forward (Dehghani et al. 2019,
section 2.1; Chollet 2017; as in tensor2tensor).

    y = W_2 C_2 relu(W_1 C_1 x),    (C x)_t = sum_s c_s * x_(t - s),    a weight c_s for every channel

C_1 and C_2 are as wide as ``first_kernel`` and ``second_kernel``. In an encoder they look as far back as ahead; in a
decoder back alone, and the state holds the last tokens of what enters either. There are zeros beyond both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.contract import CausalMixer, Chunk, real_resets, select_valid, state_dtype
from kinformer.core.encoder import EncoderMixer, SequenceContext, refuse_global
from kinformer.core.feed_forward import FeedForwardConfig
from kinformer.core.parts import ResidualOutput
from kinformer.projections.shifted import shifted_sum
from kinformer.projections.short_convolution import CausalConvolution
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class SeparableTransition(FeedForwardConfig):
    """The config: kernels are odd numbers of tokens; ``hidden_dim`` is the width between the two convolutions."""

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

    def check(self, global_tokens: bool, global_input: bool) -> None:
        refuse_global("a separable convolution is of neighbours, and a global input has none", False, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        hidden = self.up(_centred(self.first, select_valid(x, text.valid))).relu()
        return select_valid(self.down(_centred(self.second, select_valid(hidden, text.valid))), text.valid)


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

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> ConvolutionState:
        like = self.up.weight
        device, dtype = device or like.device, state_dtype(dtype or like.dtype)
        return ConvolutionState(*(torch.zeros(batch, 1, *size, device=device, dtype=dtype) for size in self._sizes))

    @property
    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.first.context, self.up.in_features), (self.second.context, self.up.out_features)

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return sum(tokens * channels for tokens, channels in self._sizes) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: ConvolutionState) -> tuple[Tensor, ConvolutionState]:
        valid, reset = chunk.valid, real_resets(chunk)
        mixed, first = self.first(select_valid(chunk.x, valid)[:, None], state.first, valid, reset)
        hidden = select_valid(self.up(mixed[:, 0]).relu(), valid)
        mixed, second = self.second(hidden[:, None], state.second, valid, reset)
        return select_valid(self.down(mixed[:, 0]), valid), ConvolutionState(first, second)
