"""The process and its processor: settings that a command may change for good, and the path of float32 products."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kinformer.runtime.compiling import constant


def process_peak() -> int:
    """Return the most bytes of memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, and KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# The processor at hand: the flags that Linux reports, and the class that measured tables are keyed by.


@cache
def processor() -> str | None:
    """Return Linux's description of the processor, its flags among it; None where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None


@cache
def processor_class() -> str:
    """Return the key of tables by processor: ``AMX``, ``AVX-512 and bfloat16`` or ``other``, by the flags."""
    flags = processor() or ""
    return "AMX" if "amx_tile" in flags else "AVX-512 and bfloat16" if "avx512_bf16" in flags else "other"


def has_amx() -> bool:
    """Return whether this x86 processor has AMX tiles; True where that cannot be determined."""
    return processor() is None or processor_class() == "AMX"


def emulates_bfloat16() -> bool:
    """Return whether this x86 processor lacks bfloat16 products, which are then several times slower; else False."""
    flags = processor() or ""
    return "sse2" in flags and processor_class() == "other" and "avx_ne_convert" not in flags


@cache
def multiplies_int8(device: str) -> bool:
    """Return whether PyTorch's int8 products are exact and faster than float32 on the device, such as ``cpu``."""
    flags = processor() or ""
    vnni = "avx512_vnni" in flags or "avx_vnni" in flags
    return device == "cpu" and torch.backends.mkldnn.is_available() and vnni


# The settings that a command's process may change for good, and that functions of the package restore.

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
"""Bytes of free memory that stay with the process; bytes from which a freed block returns at once (glibc's largest)."""
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


# The path of float32 products on a CPU, by ``torch.set_float32_matmul_precision``.
#
# Every setting but "highest" uses oneDNN (see :func:`use_fast_products`), which is twice as fast for large products. A
# call of oneDNN takes so long to start that products of a few rows are 2 to 15 times slower. Such products are all of a
# generation step, and the products inside PyTorch's fused attention, a loop of small products.
#
# ``benchmarks/accelerators.py`` keeps this path: by the rows ``few rows`` of ``accelerators.json``, steps of
# generation are 1.4 to 3 times as fast as with oneDNN's products. Delete :func:`few_rows` when all of these rows are
# below 1.1, and :func:`by_onednn` when the rows ``sets`` are below 1.1 too (``kernels.attention.cached``).

ONEDNN_FROM = 16**3
"""Multiplications of a product from which on PyTorch asks oneDNN."""
FEW = 32
"""Number of rows below which a product is small at any width."""

_EMULATED = emulates_bfloat16()  # found when imported, not while a graph is captured


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which our kernels of softmax attention multiply tensors like ``x``.

    A CPU cannot add up half-precision products into a float32 result. On a CPU float16 is therefore multiplied in
    float32: a score above 65,504 would be infinite. So is bfloat16 where the processor emulates its products, which
    then take 4 to 13 times as long (one thread of an AMD EPYC without AVX-512, 8 to 16 heads, 100 to 2,048 keys).
    Elsewhere bfloat16 products stay, which are the reason to use bfloat16, and scores are rounded to bfloat16.
    """
    narrow = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and _EMULATED)
    return torch.float32 if narrow and x.device.type == "cpu" else x.dtype


@constant
def _precision() -> str:
    return torch.get_float32_matmul_precision()


def by_onednn(x: Tensor) -> bool:
    """Return whether oneDNN computes large products of ``x``, so that small ones are slow, as in half precision."""
    if x.device.type != "cpu" or x.element_size() > 4:
        return False
    return x.element_size() < 4 or _precision() != "highest"


@contextmanager
def few_rows(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Let products on a CPU take PyTorch's default path within the context, if ``wanted``, for steps of one token.

    All threads share the setting, so only a command's process changes it; a caller's process is not changed.
    """
    before = torch.get_float32_matmul_precision()
    not_cpu = device.type != "cpu" or torch.cuda.is_available()  # the setting is the GPU's
    if not wanted or not is_command() or not_cpu or before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
