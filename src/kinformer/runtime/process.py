"""The settings that a command's process may change for good, and that functions of the package restore."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kinformer.runtime.processor import has_amx

_set_up = False


def begin_process(fast_products: bool = True) -> None:
    """Set up this whole process for computation; only a command and the processes that it starts may call this.

    ``fast_products``: whether to call :func:`use_fast_products`.
    """
    global _set_up
    _set_up = True
    flush_subnormals()
    if fast_products:
        use_fast_products()
    keep_memory()


def is_command() -> bool:
    """Return whether a command owns this process, so that no other thread computes with other settings."""
    return _set_up


def use_fast_products() -> None:
    """Let float32 products on a CPU take oneDNN's path, which on many CPUs is twice as fast at float32 accuracy.

    PyTorch calls the setting "medium". It holds for all threads of the process, so functions of the package never set
    it. With AMX and on a GPU the setting means bfloat16, so it is set only where the processor certainly lacks AMX and
    the machine lacks a GPU. A server does not set it: oneDNN keeps a compiled product for every shape, and the batches
    of a server always have new shapes, so its memory would grow.
    """
    if platform.machine() in ("x86_64", "AMD64") and not has_amx() and not torch.cuda.is_available():
        torch.set_float32_matmul_precision("medium")


def flush_subnormals() -> None:
    """Flush numbers below the smallest normal one to 0 in this process.

    On some processors an operation with a subnormal number takes a hundred cycles, and softmax leaves many. A thread
    inherits the setting when it starts, so call this before the first parallel operation.
    """
    torch.set_flush_denormal(True)


_RETAINED, _MAPPED = 512 << 20, 32 << 20
"""Bytes of free memory that stay with the process, and bytes from which a block returns to the system when it is freed,
the most that glibc allows."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of both parameters in glibc's mallopt."""


def keep_memory() -> None:
    """Let freed memory stay with this process, which must be the process of a command; Linux with glibc only.

    By default glibc returns the top of its memory to the system as soon as a few large tensors are freed. The next step
    allocates it again, and the system clears it page by page: training steps then take 2 to 17 % longer (AMD EPYC, two
    cores, ``benchmarks/kept_memory.py``). The largest resident set grows by up to a quarter.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _RETAINED)
        mallopt(_MMAP_THRESHOLD, _MAPPED)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore PyTorch's threads and precision of products on leaving, also after an error."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
