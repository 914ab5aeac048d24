"""Where something was measured: the processor or GPU, threads, versions, and how busy it was."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kinformer import __version__
from kinformer.runtime.processor import processor


def machine(device: str) -> dict[str, Any]:
    """Return the facts of this machine and ``device`` as data that JSON can hold."""
    facts = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    return facts | {"versions": {"kinformer": __version__} | {name: _version(name) for name in ("torch", "numpy")}}


def described(facts: dict[str, Any]) -> str:
    """Return a machine's facts as one phrase."""
    threads = facts.get("threads")
    return f"{facts.get('processor') or facts.get('architecture')}, {facts.get('device')}, {threads} threads"


def _processor() -> str:
    lines = (processor() or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
