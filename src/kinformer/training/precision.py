"""The precision of a training step: the dtypes of its products."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Return the context of a forward pass in ``precision``: "fp32" or "bf16-mixed"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
