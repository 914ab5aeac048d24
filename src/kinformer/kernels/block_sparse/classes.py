"""Positions of equal remainder side by side: the layout in which strided patterns are contiguous."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def to_classes(x: Tensor, first: int, stride: int, origin: int, units: int, fill: float = 0.0) -> Tensor:
    """[n, group, time, width] -> [n * stride, group, units, width], ``fill`` where there is no such position.

    ``x`` begins at position ``first``; unit u of class c holds position (origin + u) * stride + c.
    """
    if stride == 1:
        return x
    n, group, time, width = x.shape
    before = first - origin * stride
    x = functional.pad(x, (0, 0, before, units * stride - before - time), value=fill)
    return x.view(n, group, units, stride, width).permute(0, 3, 1, 2, 4).reshape(n * stride, group, units, width)


def from_classes(x: Tensor, first: int, stride: int, origin: int, time: int) -> Tensor:
    """The inverse: [n * stride, group, units, width] -> [n, group, time, width]."""
    if stride == 1:
        return x
    classes, group, units, width = x.shape
    before = first - origin * stride
    x = x.view(classes // stride, stride, group, units, width).permute(0, 2, 3, 1, 4)
    return x.reshape(classes // stride, group, units * stride, width)[:, :, before : before + time]
