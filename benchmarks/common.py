"""What the benchmark scripts share: interleaved timing, the correctness gate, the description of the machine, results.

A measurement is a ratio taken in one run: all contestants run in one process, in rounds, one step each per round and
in a new order every time, so that what else the machine does falls on all of them alike. What is reported is the
median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kinformer.runtime.process import begin_process, has_amx

RESULTS = Path(__file__).parent / "results"
EXTRA = "'kinformer[peers]'"
PEERS = {  # module: what pip is to install for it
    "fast_transformers": "--no-build-isolation pytorch-fast-transformers",  # built against the PyTorch that is there
    "fla": "flash-linear-attention",
    "x_transformers": EXTRA,
    "transformers": EXTRA,
    "xllamacpp": EXTRA,
    "gguf": EXTRA,
    "local_attention": EXTRA,
    "performer_pytorch": EXTRA,
    "reformer_pytorch": EXTRA,
    "routing_transformer": EXTRA,
}


@dataclass
class Contestant:
    """One thing that is timed: ``step()`` does it once; ``fast`` lets its fp32 products take oneDNN's path."""

    name: str
    step: Callable[[], Any]
    fast: bool = False
    seconds: list[float] = field(default_factory=list)

    def run(self) -> Any:
        with products(self.fast):
            return self.step()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@contextmanager
def products(fast: bool) -> Iterator[None]:
    """PyTorch's default fp32 products, or (``fast``) the settings that a command makes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    if fast:
        begin_process()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def interleave(contestants: Sequence[Contestant], rounds: int, warm_up: int = 1) -> None:
    """Fill ``seconds`` of every contestant with ``rounds`` measurements, after ``warm_up`` rounds that do not count."""
    order = list(contestants)
    shuffle = random.Random(0).shuffle
    for index in range(warm_up + rounds):
        shuffle(order)
        for contestant in order:
            with products(contestant.fast):
                begun = time.perf_counter()
                contestant.step()
                seconds = time.perf_counter() - begun
            if index >= warm_up:
                contestant.seconds.append(seconds)


def medians(steps: Mapping[str, Callable[[], object]], rounds: int, warm_up: bool) -> dict[str, float]:
    """Milliseconds of processor time of each step, the median of ``rounds`` in turns: what else the machine does
    takes none of it."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + warm_up):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            if index >= warm_up:
                taken[name].append((time.process_time() - begun) * 1000)
    return {name: statistics.median(values) for name, values in taken.items()}


def gate_equal(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> float:
    """Stop the benchmark unless both agree to ``tolerance`` of the largest value; returns the gap."""
    gap = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
    if not gap <= tolerance:
        raise SystemExit(
            f"{name}: differs by {gap:.2g} of the largest value, expected at most {tolerance:g}; not timed."
        )
    return gap


def gate_learning(name: str, losses: Sequence[float]) -> dict[str, float]:
    """Stop the benchmark unless the losses of repeated steps on one batch are finite and fall."""
    if not all(map(math.isfinite, losses)) or not losses[-1] < losses[0]:
        raise SystemExit(f"{name}: the loss on one batch went {losses[0]:.4f} -> {losses[-1]:.4f}; not timed.")
    return {"first_loss": losses[0], "last_loss": losses[-1]}


def peer(module: str) -> ModuleType | None:
    """A peer's module, or None after one sentence that says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        print(f"{package} is not installed ({error}), so it is left out; get it with: pip install {PEERS[package]}.")
        return None


def kinformer(*words: Any) -> dict[str, Any]:
    """The JSON object that a command prints; its own message is all there is to say when it fails."""
    command = [sys.executable, "-m", "kinformer", *map(str, words), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])} ended with {done.returncode}; see above.")
    return json.loads(done.stdout)


def train(member: str, folder: Path, threads: int | None, *words: Any) -> dict[str, Any]:
    """What ``kinformer train`` tells of the run in ``folder``: begun with ``words``, or gone on with if it is there."""
    more = ("--resume",) if (folder / "config.json").is_file() else words
    return kinformer("train", member, "--out", folder, *more, *(("--threads", threads) if threads else ()))


def sets(changes: Mapping[str, Any]) -> list[str]:
    """``changes`` of a config as words of a command: --set PATH=VALUE for each."""
    return [word for path, value in changes.items() for word in ("--set", f"{path}={value}")]


def of_width(dim: int) -> dict[str, int]:
    """The changes that make a member's recipe so wide, with heads of 64."""
    return {"dim": dim, "layers.*.mixer.num_heads": dim // 64, "layers.*.feed_forward.hidden_dim": 4 * dim}


def in_process(script: str, *words: Any) -> dict[str, Any]:
    """The JSON object that ``script`` prints when it is run with ``words`` in a fresh process of as many threads."""
    command = [sys.executable, script, "--threads", str(torch.get_num_threads()), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} ended with {done.returncode}; see above.")
    return json.loads(done.stdout)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of values ~ sizes^p, by least squares on their logarithms."""
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, values))).slope


def text_bytes(path: str | None, count: int) -> Tensor:
    """``count`` bytes [count] int64 of the file ``path`` (by default of Python's own sources), repeated if short."""
    if path is None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)
    else:
        data = Path(path).read_bytes()
    tokens = torch.frombuffer(bytearray(data[:count]), dtype=torch.uint8).long()
    return tokens.repeat(-(-count // len(tokens)))[:count]


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """The processor, the threads, the versions, and how busy the machine was before and after the run."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "amx": has_amx(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(terse=True),
        "load_average": {"before": options.load, "after": [round(load, 2) for load in os.getloadavg()]},
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("kinformer", "torch", *map(_distribution, PEERS))},
    }


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _distribution(module: str) -> str:
    return "pytorch-fast-transformers" if module == "fast_transformers" else module.replace("_", "-")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def memory(name: str) -> int:
    """Bytes of this process by a line of /proc/self/status: VmRSS (resident now) or VmHWM (resident at most)."""
    value = _field("/proc/self/status", name)
    if value is None:
        raise SystemExit("/proc/self/status cannot be read, so memory cannot be measured here; use Linux.")
    return int(value.split()[0]) * 1024


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every script; ``--quick`` only tries it out and keeps no result file unless told where."""
    text = (description or "").strip()
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small steps, to see that everything works")
    parser.add_argument("--rounds", type=int, help="measurements per contestant")
    parser.add_argument("--threads", type=int, help="CPU threads (PyTorch's own choice if not given)")
    parser.add_argument("--out", type=Path, help="the result file (benchmarks/results/NAME.json, none with --quick)")
    return parser


def prepare(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed options, after setting threads and seed."""
    options = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line has it
    options.load = [round(load, 2) for load in os.getloadavg()]
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options


def save(options: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    """Write ``result`` with the machine's description beside it."""
    path = options.out or (None if options.quick else RESULTS / f"{name}.json")
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": name, "date": time.strftime("%Y-%m-%d"), "quick": options.quick}
    path.write_text(json.dumps(head | {"machine": machine(options)} | result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table: the first column on the left, numbers on the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *cells):
        first, *rest = (str(cell) for cell in row)
        print(
            "  ".join(
                [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
            )
        )


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
