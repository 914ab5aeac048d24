"""The memory that this process has freed: whether it stays with the process."""

from __future__ import annotations

import ctypes
import sys

_RETAINED, _MAPPED = 512 << 20, 32 << 20
"""Bytes of free memory that stay with the process; bytes from which on a block is the system's again once it is free,
the most that glibc allows."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc's mallopt calls them."""


def keep_memory() -> None:
    """Let freed memory stay with this process, which must be our own, as a command's is; Linux with glibc only.

    Left to itself glibc gives the top of its memory back as soon as a few large tensors are freed, and the next step
    allocates it again and has the system clear it page by page: training steps then take 2 to 17 % longer (AMD EPYC,
    two cores, ``benchmarks/kept_memory.py``). The largest resident set grows by up to a quarter.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _RETAINED)
        mallopt(_MMAP_THRESHOLD, _MAPPED)
