"""A causal convolution over time with separate weights for every head and channel.

    y_t = sum_b w_b x_(t - b),    dx_s = sum_b w_b dy_(s + b),    dw_b = sum_t dy_t x_(t - b)

On a CPU the gradients are computed piece by piece of the time, so that what all taps read stays in the cache, and into
one tensor: autograd would fill a tensor with zeros for every tap.

``benchmarks/accelerators.py`` keeps it: by the rows ``convolution`` of ``accelerators_other.json`` it is 2.6 to 2.8
times as fast (an AMD EPYC). Delete :class:`_ShiftedSum` when they are all below 1.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.contract import state_dtype
from kinformer.runtime.derivatives import Context

PIECE = 1 << 17
"""Elements of a piece of one row: half a megabyte in float32."""


def shifted_sum(tokens: Tensor, weight: Tensor, inside: Callable[[int], Tensor] | None) -> Tensor:
    """Return y_t = sum_b weight[b] x_(t - b), b = 0 ... width - 1.

    tokens: x [batch, heads, width - 1 + time, channels], led by what came before; weight: [width, heads, channels];
    one head of x may serve all of the weight.
    inside: whether the token ``b`` back is one of the same sequence, [batch, time] bool; None: all are.
    Returns [batch, heads, time, channels].
    """
    weight = weight.to(tokens.dtype)
    learns = torch.is_grad_enabled() and (tokens.requires_grad or weight.requires_grad)
    if learns and inside is None and tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        return _ShiftedSum.apply(tokens.expand(-1, weight.shape[1], -1, -1), weight)
    return by_autograd(tokens, weight, inside)


def by_autograd(tokens: Tensor, weight: Tensor, inside: Callable[[int], Tensor] | None) -> Tensor:
    """Return the sum of :func:`shifted_sum` by PyTorch's operations, whose gradients are autograd's."""
    weight = weight[:, :, None]
    present, *past = _shifted(tokens, len(weight))
    mixed = present * weight[0]
    for back, earlier in enumerate(past, 1):
        if inside is not None:
            earlier = torch.where(inside(back)[:, None, :, None], earlier, earlier.new_zeros(()))
        mixed = torch.addcmul(mixed, earlier, weight[back])
    return mixed


class _ShiftedSum(torch.autograd.Function):
    """The sum over all tokens, with derivatives of any order and in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor) -> Tensor:
        return by_autograd(tokens, weight, None)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            context = len(weight) - 1
            of_tokens = shifted_sum(pad(gradient, (0, 0, context, context)), weight.flip(0), None)
            return of_tokens, torch.stack([(gradient * x).sum((0, 2)) for x in _shifted(tokens, len(weight))])
        return _gradients(tokens, weight, gradient)

    @staticmethod
    def jvp(ctx: Context, tokens_tangent: Tensor | None, weight_tangent: Tensor | None) -> Tensor:
        tokens, weight = ctx.saved_tensors
        parts = [(tokens_tangent, weight), (tokens, weight_tangent)]
        return sum(shifted_sum(x, w, None) for x, w in parts if x is not None and w is not None)  # type: ignore[return-value]


def _shifted(tokens: Tensor, width: int) -> list[Tensor]:
    """Return x_(t - b) [batch, heads, time, channels] for every tap b."""
    time = tokens.shape[2] - width + 1
    return [tokens[:, :, width - 1 - back :][:, :, :time] for back in range(width)]


def _gradients(tokens: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx and dw for the gradient of y, piece by piece of the time of each row."""
    width, heads, channels = weight.shape
    of_tokens = torch.empty_like(tokens)
    of_tokens[:, :, : width - 1] = 0
    torch.mul(gradient, weight[0, :, None], out=of_tokens[:, :, width - 1 :])
    of_weight = torch.zeros_like(weight, dtype=state_dtype(weight.dtype))
    steps = max(1, PIECE // (heads * channels))
    for row, dy in enumerate(gradient):
        for begin in range(0, dy.shape[1], steps):
            piece = dy[:, begin : begin + steps]
            for back in range(width):
                first = begin + width - 1 - back
                there = slice(first, first + piece.shape[1])
                of_weight[back] += (piece * tokens[row, :, there]).sum(1)
                if back:
                    of_tokens[row, :, there].addcmul_(piece, weight[back, :, None])
    return of_tokens, of_weight.to(weight.dtype)
