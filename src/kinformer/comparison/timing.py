"""Times of several works measured in turns, and the peak memory of one in a process of its own."""

from __future__ import annotations

import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from kinformer.runtime.children import safe_path
from kinformer.runtime.errors import KinformerError, memory_sentence
from kinformer.runtime.progress import note

P = ParamSpec("P")
K = TypeVar("K")
T = TypeVar("T")
SLOWEST = 30.0
"""Seconds: a work that takes longer is done once and not again."""


def in_turns(works: Mapping[K, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[K, float]:
    """Return the median seconds of each work over ``rounds``, after one that does not count.

    The order is redrawn in every round, so that whatever else the machine does meets all alike. A work that fails,
    such as one that runs out of memory, is left out with a note.
    """
    seconds: dict[K, list[float]] = {key: [] for key in works}
    order, shuffle = list(works), random.Random(0).shuffle
    for index in range(rounds + 1):
        shuffle(order)
        for key in list(order):
            if index > 1 and seconds[key][0] > SLOWEST:
                continue
            try:
                spent = timed(works[key], device)
            except Exception as error:
                plain = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                note(f"{key} is not timed: {memory_sentence(error) or plain}")
                order.remove(key)
                del seconds[key]
                continue
            if index or spent > SLOWEST:
                seconds[key].append(spent)
    return {key: statistics.median(second) for key, second in seconds.items()}


def timed(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds that ``work`` takes, until the device is done with it."""
    _wait(device)
    started_at = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started_at


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class Peak:
    """The peak bytes since :meth:`restart`, above those when the object was made."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before = self._now()

    def restart(self) -> None:
        """Forget the peak so far, where the system can (a GPU, Linux)."""
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @property
    def bytes(self) -> int:
        """The peak bytes of the device, or on a CPU of this process, above those at the start."""
        if self.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(self.device) - self.before
        if sys.platform == "linux":
            return _status("VmHWM") - self.before
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - self.before

    def _now(self) -> int:
        if self.device.startswith("cuda"):
            return torch.cuda.memory_allocated(self.device)
        if sys.platform == "linux":
            return _status("VmRSS")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def in_fresh_process(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return what ``function``, which must be importable, returns in a process that did nothing before.

    Errors: what it raises; ``KinformerError`` where the system ended the process, as it does when memory is short.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with (
            safe_path(),
            ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(torch.get_num_threads(),)) as pool,
        ):
            return pool.submit(function, *arguments, **options).result()
    except BrokenProcessPool:
        raise KinformerError(
            "its process was ended by the system, which happens when memory is short; choose smaller sizes."
        ) from None


def _begin(threads: int) -> None:
    from kinformer.runtime.process import begin_process

    begin_process()
    torch.set_num_threads(threads)
