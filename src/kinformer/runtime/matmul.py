"""The path of float32 products on a CPU, by ``torch.set_float32_matmul_precision``.

Every setting but "highest" uses oneDNN (see ``runtime.process``), which is twice as fast for large products. A call of
oneDNN takes so long to start that products of a few rows are 2 to 15 times slower. Such products are all of a
generation step, and the products inside PyTorch's fused attention, a loop of small products.

``benchmarks/accelerators.py`` keeps this file: by the rows ``few rows`` of ``accelerators.json``, steps of generation
are 1.4 to 3 times as fast as with oneDNN's products. Delete :func:`few_rows` when all of these rows are below 1.1, and
:func:`by_onednn` when the rows ``sets`` are below 1.1 too (``kernels.attention.cached``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kinformer.runtime.compiling import constant
from kinformer.runtime.process import is_command
from kinformer.runtime.processor import emulates_bfloat16

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
    """Return whether oneDNN computes large products of ``x``, so that small products are slow; in half precision it
    always does."""
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
