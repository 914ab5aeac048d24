"""How much of its work a kernel in plain PyTorch does at a time, by device.

On a CPU a tile should stay in the caches. A GPU works ahead of Python, and a call costs some microseconds of Python
whatever it computes, so that tiles are larger there.
"""

from __future__ import annotations

import torch

GPU_TILES = 64
"""How many tiles of a CPU make one of a GPU: of 16,384 causal tokens and 16 heads a forward then has 128 tiles of some
ten calls, not 8,000, and its backward twice as many; both take 123 ms on an H200, 53 microseconds a call of Python
(results/gpu.json). The size itself was not tuned."""


def tile_size(of_cpu: int, device: torch.device) -> int:
    """Return the size of a tile on ``device`` where it is ``of_cpu`` on a CPU."""
    return of_cpu * GPU_TILES if device.type == "cuda" else of_cpu
