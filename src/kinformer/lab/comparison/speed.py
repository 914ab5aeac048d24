"""The speed of training and generating, measured in turns, and the memory of contestants."""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from kinformer import __version__
from kinformer.lab.children import end_with_parent, safe_path
from kinformer.lab.comparison import works
from kinformer.lab.comparison.options import CompareOptions
from kinformer.lab.comparison.plan import Contestant, guarded, planned, still_in
from kinformer.lab.comparison.record import Cache, LengthBytes, MachineFacts, Memory, SpeedPoint, key_of
from kinformer.lab.runs.minutes import measured_update
from kinformer.lab.runs.options import TrainOptions
from kinformer.runtime.errors import KinformerError, memory_sentence, plural
from kinformer.runtime.process import process_peak, processor
from kinformer.runtime.progress import note

# The times of several works, measured in turns, and the peak memory of one work in a fresh process.

P = ParamSpec("P")
K = TypeVar("K")
T = TypeVar("T")
SLOWEST = 30.0
"""Seconds; a work that takes longer runs only once."""


def in_turns(
    works: Mapping[K, Callable[[], object]], rounds: int, device: str = "cpu", end: float = inf
) -> dict[K, float]:
    """Return the median seconds of each work over ``rounds``, after one warm-up round. After the time ``end``, by
    ``time.monotonic()``, no further round begins except for the first. Every round has a new random order, so that
    other load on the machine affects all works alike. A work that fails is left out with a note."""
    seconds: dict[K, list[float]] = {key: [] for key in works}
    order, shuffle = list(works), random.Random(0).shuffle
    for index in range(rounds + 1):
        if index > 1 and time.monotonic() > end:
            break
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
    """Return the seconds of ``work`` until the device has finished."""
    _wait(device)
    started_at = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started_at


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class Peak:
    """The peak bytes since :meth:`restart`, above the bytes at the creation of the object."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before = self._read(peak=False)

    def restart(self) -> None:
        """Forget the peak so far; only a GPU and Linux support this."""
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            # 5 resets VmHWM, the peak of the resident memory, to the present size (proc(5)).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @property
    def bytes(self) -> int:
        """The peak bytes of the device, or of this process on a CPU, above the bytes at the start."""
        return self._read(peak=True) - self.before

    def _read(self, peak: bool) -> int:
        if self.device.startswith("cuda"):
            return (torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(self.device)
        if sys.platform != "linux":
            return process_peak()
        name, lines = "VmHWM" if peak else "VmRSS", Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_fresh_process(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call ``function``, which must be importable, in a fresh process, and return its result.

    Errors: the exception of ``function``; ``KinformerError`` if the system ended the process, as when memory is short.
    """
    context = multiprocessing.get_context("spawn")
    try:
        threads = (torch.get_num_threads(),)
        with safe_path(), ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=threads) as pool:
            return pool.submit(function, *arguments, **options).result()
    except BrokenProcessPool:
        raise KinformerError("the system ended its process, as when memory is short; choose smaller sizes.") from None


def _begin(threads: int) -> None:
    from kinformer.runtime.process import begin_process

    end_with_parent()
    begin_process()
    torch.set_num_threads(threads)


# The machine of a measurement: its facts, and its limits (products, bytes read, calls).

SIZES, ROWS, TRIES, CALLS = (512, 1024, 2048), 8192, 5, 10_000
SLOW_PRODUCT = 0.2  # s


def machine(device: str) -> MachineFacts:
    """Return the facts of this machine and ``device`` as JSON-ready data."""
    lines = (processor() or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(named, platform.processor() or platform.machine()),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {"kinformer": __version__, **{name: version(name) for name in ("torch", "numpy")}},
    }


def described(facts: MachineFacts) -> str:
    """Return a machine's facts as one phrase."""
    threads = plural(facts["threads"], "thread") if facts.get("threads") else "threads unknown"
    return f"{facts.get('processor') or facts.get('architecture')}, {facts.get('device')}, {threads}"


@dataclass(frozen=True)
class Floor:
    """The measured limits of a machine.

    flops, narrow_flops: the FLOPs per second of the best square product in float32 and in bfloat16.
    bandwidth: the bytes per second that a product of one row with a large matrix reads.
    call, operator: the seconds of a call of an empty Python function, and of a sum of two single numbers in PyTorch.
    """

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
    """Return the most FLOPs per second of square products; a product of n x n matrices takes 2 n^3 FLOPs."""
    rates = []
    for size in SIZES:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = [timed(lambda a=a, b=b: a @ b, device) for _ in range(TRIES)]  # type: ignore[misc]
        rates.append(2 * size**3 / min(seconds))
        if min(seconds) > SLOW_PRODUCT:  # a processor without bfloat16 instructions gains nothing from larger sizes
            break
    return max(rates)


def _seconds_per_call(work: Callable[[], object], device: str) -> float:
    """Return the mean seconds of one call over many calls."""

    def many() -> None:
        for _ in range(CALLS):
            work()

    return min(timed(many, device) for _ in range(TRIES)) / CALLS


BATCHES = (1, 16)
PROMPT = 128


def stepper(options: TrainOptions, device: str) -> Callable[[], object]:
    """Return a function that makes a training step with the trainer's code, at a learning rate of 0."""
    task, plan = planned(options)
    update, _ = measured_update(plan, task, device)
    numbers = count()
    return lambda: float(update(next(numbers), 0.0, 0.0).loss)


def training_speeds(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """Record the ``training`` speed of each contestant: the seconds of a step, the seconds of the anchor (the first
    contestant) in the same rounds, and the date. Contestants without a cached speed are measured in turns."""
    device = options.usable_device()
    sizes = ["training", options.length, options.batch_size, options.optimizer, options.precision, device.type]
    keys = {item.name: key_of([sizes, item.model_key, torch.get_num_threads()]) for item in still_in(contestants)}
    for contestant in still_in(contestants):
        contestant.note(training=cache.get("speed", keys[contestant.name]))
    missing = [item for item in still_in(contestants) if item.record.training is None]
    if not missing:
        return
    anchor = still_in(contestants)[0]
    steps = {}
    for contestant in missing if anchor in missing else [anchor, *missing]:
        with guarded(contestant, "its first training steps"):
            first = stepper(contestant.options(Path(), options.middle, options.seed, 1), str(device))
            first()
            steps[contestant.name] = first
    seconds = in_turns(steps, options.rounds, str(device))
    for contestant in missing:
        if contestant.name not in seconds:
            contestant.error = contestant.error or "its first training steps failed."
            continue
        anchored = {"anchor": anchor.name, "anchor_value": seconds.get(anchor.name), "date": time.strftime("%Y-%m-%d")}
        contestant.note(training={"seconds": seconds[contestant.name], **anchored})
        cache.put("speed", keys[contestant.name], contestant.record.training)


def generation_speeds(
    contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, end: float = inf
) -> None:
    """Record the speed of ``generation``: the seconds of a token by the rows, after a prompt of 128 tokens."""
    subjects = [contestant for contestant in still_in(contestants) if works.generates(contestant.config)]
    _measured(subjects, "generation", [("decode", batch, PROMPT) for batch in BATCHES], options, cache, end)


def length_speeds(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, end: float = inf) -> None:
    """Record the speeds at ``lengths``: the seconds of a forward and of a training step of one row, by length."""
    subjects = [contestant for contestant in still_in(contestants) if works.reads_tokens(contestant.config)]
    points = [(kind, 1, length) for length in options.measured_lengths for kind in ("forward", "step")]
    _measured(subjects, "lengths", points, options, cache, end)


def _measured(
    subjects: Sequence[Contestant],
    stage: Literal["generation", "lengths"],
    points: Sequence[tuple[str, int, int]],
    options: CompareOptions,
    cache: Cache,
    end: float,
) -> None:
    """Measure each missing point of all contestants in turns, together with the anchor. A point that would take longer
    than the time until ``end`` is left out: a work of twice as many tokens takes at most four times as long."""
    device = options.usable_device()
    sizes = [options.rounds, device.type, torch.get_num_threads(), options.precision]
    content = [stage, list(map(list, points)), *sizes, options.total_minutes if end < inf else None]
    keys = {item.name: key_of([content, item.model_key]) for item in subjects}
    for contestant in subjects:
        contestant.note(**{stage: cache.get("speed", keys[contestant.name])})
    missing = [item for item in subjects if getattr(item.record, stage) is None]
    if not missing:
        return
    chosen = missing if subjects[0] in missing else [subjects[0], *missing]
    models: dict[str, nn.Module] = {}
    for contestant in chosen:
        with guarded(contestant, f"measuring {stage}"):
            torch.manual_seed(options.seed)
            model = contestant.config.build().to(device)
            if stage == "lengths":  # the same models generate
                works.check_correct(model)
            models[contestant.name] = model
    rows: dict[str, list[SpeedPoint]] = {name: [] for name in models}
    spent: dict[str, tuple[int, float]] = {}
    skipped = []
    for kind, batch, length in points:
        before, seconds_before = spent.get(kind, (length, 0.0))
        if time.monotonic() + 2 * seconds_before * (length / before) ** 2 > end:
            skipped.append(f"{kind} of {plural(length, 'token')}")
            continue
        work_by_name: dict[str, works.Work] = {}
        for contestant in chosen:
            if contestant.name in models and works.room_for(models[contestant.name], kind, length, options.rounds):
                with guarded(contestant, f"{kind} of {plural(length, 'token')}"):
                    work_by_name[contestant.name] = works.WORKS[kind](models[contestant.name], batch, length)
        times = in_turns(work_by_name, options.rounds, str(device), end)
        spent[kind] = length, sum(times.values())
        for name, seconds in times.items():
            share = works.DECODED if kind == "decode" else 1
            rows[name].append({"kind": kind, "batch": batch, "length": length, "seconds": seconds / share})
    if skipped:
        note(f"not timed, because `total_minutes` does not suffice: {', '.join(dict.fromkeys(skipped))}.")
    for contestant in missing:
        if contestant.name in rows:
            anchored = {"anchor": subjects[0].name, "anchor_value": rows.get(subjects[0].name)}
            speeds = {"points": rows[contestant.name], **anchored, "date": time.strftime("%Y-%m-%d")}
            contestant.note(**{stage: speeds})
            cache.put("speed", keys[contestant.name], speeds)


def memory_of(contestant: Contestant, options: CompareOptions, cache: Cache) -> Memory:
    """Return the peak bytes of training above an empty process, and of a step of one row by length above the model."""
    device = options.usable_device()
    job = contestant.options(Path(), options.middle, options.seed, 1)
    content = ["memory", options.lengths, options.length, options.batch_size, options.optimizer, device.type]
    key = key_of([content, options.precision, contestant.model_key, torch.get_num_threads()])
    return cache.once("memory", key, lambda: in_fresh_process(peaks, job, options.measured_lengths, str(device)))


def step_peaks(model: Any, lengths: Sequence[int], batch: int, device: str) -> Iterator[tuple[int, int]]:
    """Yield each length that ``model`` reads, and the peak bytes of a training step above the model itself."""
    peak = Peak(device)
    for length in lengths:
        if works.room_for(model, "step", length, 0):
            peak.restart()
            works.step(model, batch, length)()
            yield length, max(0, peak.bytes)


def peaks(options: TrainOptions, lengths: Sequence[int], device: str) -> Memory:
    """Measure the result of :func:`memory_of`; this must run in a fresh process."""
    _, plan = planned(options)
    empty = Peak(device)
    by_length: list[LengthBytes] = []
    if works.reads_tokens(plan.config):
        model = plan.config.build().to(device)
        by_length = [{"length": length, "bytes": size} for length, size in step_peaks(model, lengths, 1, device)]
        del model
    empty.restart()
    step = stepper(options, device)
    for _ in range(2):
        step()
    return {"training": empty.bytes, "lengths": by_length}
