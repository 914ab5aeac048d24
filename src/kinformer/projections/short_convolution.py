"""A short causal convolution over time, for each channel alone: y_t = sum_b weight_b x_(t - b).

With SiLU behind it, of q, k and v, it is that of Fu et al. 2023 (H3), as DeltaNet and Gated DeltaNet have it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import right_align
from kinformer.projections.shifted import shifted_sum
from kinformer.runtime.substitutes import substitute


def convolve(
    x: Tensor, weight: Tensor, recent: Tensor, valid: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x [batch, heads, time, channels] convolved by ``weight`` [width, heads, channels], and the tokens that
    later ones need; arguments as of :class:`CausalConvolution`. One head of x may serve all of the weight."""
    context = len(weight) - 1
    time = x.shape[2]
    tokens = torch.cat([recent.to(x.dtype), x], dim=2)
    if reset is None:
        mixed = shifted_sum(tokens, weight, None)
    else:
        sequence = functional.pad(reset.long().cumsum(1), (context, 0))
        output = sequence[:, context:]
        mixed = shifted_sum(tokens, weight, lambda back: output == sequence[:, context - back :][:, :time])
        tokens = torch.where((sequence == sequence[:, -1:])[:, None, :, None], tokens, tokens.new_zeros(()))
    if valid is not None:
        tokens = right_align(tokens, valid.sum(dim=1), time)
    return mixed, tokens[:, :, time:].to(recent.dtype, copy=True)


class CausalConvolution(nn.Module):
    """The convolution x [batch, heads, time, channels] -> the same shape; tokens before a sequence are zero.

    ``weight`` [width, heads, channels], ``weight[0]`` being that of the token itself.
    """

    def __init__(self, width: int, num_heads: int, channels: int) -> None:
        super().__init__()
        self.context = width - 1
        self.weight = nn.Parameter(torch.empty(width, num_heads, channels).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: Tensor, recent: Tensor, valid: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolved chunk, and the tokens that later ones need.

        recent: [batch, heads, width - 1, channels], the tokens before the chunk, right-aligned; valid, reset:
        [batch, time] bool or None, the valid tokens being a prefix and resets standing on valid ones.
        """
        return convolve(x, self.weight, recent, valid, reset)


class ShortConvolution(CausalConvolution):
    """The convolution :class:`CausalConvolution` followed by SiLU."""

    def forward(self, x: Tensor, recent: Tensor, valid: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        if (operator := substitute("short_convolution")) is not None and valid is None and reset is None:
            return operator(x, recent, self.weight)
        mixed, recent = super().forward(x, recent, valid, reset)
        return functional.silu(mixed), recent
