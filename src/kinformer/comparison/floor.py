"""What this machine can do at most, measured on the spot: products of matrices, bytes read from memory, and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kinformer.comparison.timing import timed

SIZES, ROWS, TRIES, CALLS = (512, 1024, 2048), 8192, 5, 10_000


@dataclass(frozen=True)
class Floor:
    """``flops``: of a second, by the best of square float32 products, and ``narrow_flops`` of bfloat16 ones;
    ``bandwidth``: bytes of a second that a product of one row with a large matrix reads. ``call``: seconds of a call of
    an empty Python function, ``operator`` of a sum of two single numbers in PyTorch."""

    flops: float
    bandwidth: float
    narrow_flops: float
    call: float
    operator: float


def measure_floor(device: str) -> Floor:
    """Measure each limit several times on ``device`` and return the best values."""
    matrix, row = torch.randn(ROWS, ROWS // 2, device=device), torch.randn(ROWS // 2, device=device)
    size, number = matrix.numel() * matrix.element_size(), torch.ones((), device=device)
    return Floor(
        flops=_products(torch.float32, device),
        bandwidth=max(size / timed(lambda: matrix @ row, device) for _ in range(TRIES)),
        narrow_flops=_products(torch.bfloat16, device),
        call=_seconds_per_call(lambda: None, device),
        operator=_seconds_per_call(lambda: torch.add(number, number), device),
    )


def _products(dtype: torch.dtype, device: str) -> float:
    """Return the most FLOPs per second of square products; one of n x n matrices takes 2 n^3 FLOPs."""
    rates = []
    for size in SIZES:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rates += [2 * size**3 / timed(lambda a=a, b=b: a @ b, device) for _ in range(TRIES)]  # type: ignore[misc]
    return max(rates)


def _seconds_per_call(work: Callable[[], object], device: str) -> float:
    """Seconds of one of many calls."""

    def many() -> None:
        for _ in range(CALLS):
            work()

    return min(timed(many, device) for _ in range(TRIES)) / CALLS
