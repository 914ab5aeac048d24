"""What this machine can do at most, measured on the spot: products of matrices, and bytes read from memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kinformer.compare.timing import timed

SIZES, ROWS, TRIES = (512, 1024, 2048), 8192, 5


@dataclass(frozen=True)
class Floor:
    """``flops``: of a second, by the best of square float32 products; ``bandwidth``: bytes of a second that a product
    of one row with a large matrix reads."""

    flops: float
    bandwidth: float


def measure_floor(device: str) -> Floor:
    """The best of several tries of each."""
    rates = []
    for size in SIZES:
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        rates += [2 * size**3 / timed(lambda a=a, b=b: a @ b, device) for _ in range(TRIES)]  # type: ignore[misc]
    matrix, row = torch.randn(ROWS, ROWS // 2, device=device), torch.randn(ROWS // 2, device=device)
    size = matrix.numel() * matrix.element_size()
    return Floor(max(rates), max(size / timed(lambda: matrix @ row, device) for _ in range(TRIES)))
