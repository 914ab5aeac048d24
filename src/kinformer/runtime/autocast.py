"""Autocast on every device. The meta device, on which costs are counted, has none, and PyTorch raises for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast gives to products on ``device``, or None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off on ``device``."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, under autocast all in its dtype (float64 stays), as torch's own attention does."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None or tensors[0].dtype == torch.float64 else tuple(x.to(dtype) for x in tensors)
