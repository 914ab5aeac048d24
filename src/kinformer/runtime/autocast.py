"""Autocast on every device. The meta device, on which costs are counted, has none, and PyTorch raises for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast gives to products on ``device``, or None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off on ``device``."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def without_autocast(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate an operator's kernel, whose first argument is a tensor: its products keep their dtype."""

    @wraps(kernel)
    def call(first: Tensor, *rest: object) -> Result:
        with no_autocast(first.device):
            return kernel(first, *rest)

    return call


def autocast_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, under autocast all in its dtype (float64 stays), as torch's own attention does."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None or tensors[0].dtype == torch.float64 else tuple(x.to(dtype) for x in tensors)
