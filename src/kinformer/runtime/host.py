"""What the host knows: the entries of small integer tensors, where control flow depends on them, and its processor; and
what becomes of its memory that is no longer used."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_data(x: Tensor) -> bool:
    """Whether it is more than a shape, which is all that is known when costs are counted."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def host_ints(x: Tensor, otherwise: int) -> list[int] | None:
    """The entries of ``x`` [n]; ``otherwise`` n times where it has none (shapes alone are known, as when costs are
    counted), None while a graph is captured, which must hold for all numbers."""
    if torch.compiler.is_compiling():
        return None
    if not has_data(x):
        return [otherwise] * x.shape[0]
    return x.tolist()


def nowhere(asked: Tensor) -> bool:
    """Whether no token of the mask ``asked`` [batch, time] is asked for. One without positions, [batch, 0], says so
    without a look at its entries."""
    return not asked.numel() or not asked.any()


_known: ContextVar[bool] = ContextVar("known", default=False)


@contextmanager
def known_values() -> Iterator[None]:
    """Within it a model does not look at its arguments for what is wrong with them: they are its own, such as a token
    that was drawn from its logits and the state that it returned."""
    before = _known.set(True)
    try:
        yield
    finally:
        _known.reset(before)


def values_known() -> bool:
    """Whether arguments need no look, as :func:`known_values` says."""
    return not torch.compiler.is_compiling() and _known.get()


@cache
def processor() -> str | None:
    """What Linux says of the processor, its flags among it; None where nothing is said."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None


@cache
def processor_class() -> str:
    """What tables of processors tell apart: ``AMX``, ``AVX-512 and bfloat16`` or ``other``, by the flags."""
    flags = processor() or ""
    return "AMX" if "amx_tile" in flags else "AVX-512 and bfloat16" if "avx512_bf16" in flags else "other"


_KEPT, _MAPPED = 512 << 20, 32 << 20
"""Bytes of free memory that stay with the process; bytes from which on a block is the system's again once it is free,
the most that glibc allows."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc's mallopt calls them."""


def keep_memory() -> None:
    """Memory that was freed stays with this process, which must be our own, as a command's is; Linux with glibc only.

    Left to itself glibc gives the top of its memory back as soon as a few large tensors are freed, and the next step
    asks for it again and has the system clear it page by page: training steps then take 2 to 17 % longer (AMD EPYC,
    two cores, ``benchmarks/kept_memory.py``). The largest resident set grows by up to a quarter.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _MAPPED)
