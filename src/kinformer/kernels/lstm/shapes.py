"""The cost of an LSTM where tensors are shapes without numbers: the same products, the same memory for the backward.

    2 * 4 width (dim + width) FLOPs a token forward, twice that backward

PyTorch hands the work to libraries whose products no counter sees. The memory is that of oneDNN as measured (torch
2.13): 15.5 numbers per token and unit, 7 per token and feature of x beyond the units, in some regions of whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_NUMBERS = 31
"""Kept per token and two units."""
_WIDER = 7
"""Kept per token and feature by which x is wider than h."""
_PAGES = 7 * 4096 // 2
"""Bytes that whole pages add on average."""


def stand_in(x: Tensor, h: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs of the right shapes: all h_t [batch, time, width], h and c."""
    w, u, w_bias, u_bias = weights
    before = h[:, None] + x[..., :1]
    y = _Work.apply(linear(x, w, w_bias), linear(before, u, u_bias), max(0, w.shape[1] - u.shape[1]))
    return y, y[:, -1], y[:, -1]


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, wider: int) -> Tensor:
        batch, time, gates = left.shape
        y = left.new_empty(batch, time, gates // 4)
        bytes_needed = batch * time * (gates // 4 * _NUMBERS // 2 + _WIDER * wider) + _PAGES // left.itemsize
        ctx.save_for_backward(y, left.new_empty(bytes_needed))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        batch, time, width = gradients[0].shape
        left, right = (gradients[0].new_empty(batch, time, 4 * width) for _ in range(2))
        return left, right, None
