"""The machine on which something is measured: its facts, and its limits (products, bytes read, calls)."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from kinformer import __version__
from kinformer.comparison.results import MachineFacts
from kinformer.comparison.timing import timed
from kinformer.runtime.processor import processor
from kinformer.runtime.words import plural

SIZES, ROWS, TRIES, CALLS = (512, 1024, 2048), 8192, 5, 10_000


def machine(device: str) -> MachineFacts:
    """Return the facts of this machine and ``device`` as data that JSON can hold."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {"kinformer": __version__, **{name: _version(name) for name in ("torch", "numpy")}},
    }


def described(facts: MachineFacts) -> str:
    """Return a machine's facts as one phrase."""
    threads = plural(facts["threads"], "thread") if facts.get("threads") else "threads unknown"
    return f"{facts.get('processor') or facts.get('architecture')}, {facts.get('device')}, {threads}"


def _processor() -> str:
    lines = (processor() or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
    """Return the seconds of one of many calls."""

    def many() -> None:
        for _ in range(CALLS):
            work()

    return min(timed(many, device) for _ in range(TRIES)) / CALLS
