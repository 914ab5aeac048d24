"""How a process computes: the dtypes of products, and what becomes of the smallest numbers."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext

import torch

from kinformer.runtime.memory import keep_memory
from kinformer.runtime.processor import processor


def use_fast_products() -> None:
    """Let float32 products on a CPU take oneDNN's path, which on many CPUs is twice as fast at float32 accuracy.

    PyTorch calls the setting "medium". With AMX it would mean bfloat16, and for a GPU it does too, so it is made only
    where the processor is known to have no AMX and there is no GPU. It holds for the whole process.
    """
    if platform.machine() in ("x86_64", "AMD64") and not has_amx() and not torch.cuda.is_available():
        torch.set_float32_matmul_precision("medium")


def flush_subnormals() -> None:
    """Numbers below the smallest normal one become 0 in this process, which must be our own, as a command's is.

    On some processors an operation with one of them takes a hundred cycles, and softmax leaves many. A thread inherits
    this when it starts, so it is to be called before the first parallel operation.
    """
    torch.set_flush_denormal(True)


def begin_process() -> None:
    """What a process of our own does before it computes: a command's, and those that it starts."""
    flush_subnormals()
    keep_memory()


def has_amx() -> bool:
    """Whether this x86 processor has AMX tiles; True where that cannot be found out."""
    flags = processor()
    return flags is None or "amx_tile" in flags


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """The context of a forward pass in ``precision``: "fp32" or "bf16-mixed"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
