"""What do the first seconds cost: the import, a model built, 20 tokens generated, a small run trained and evaluated?

Each work is a process of its own, as a shell starts it, beside the bare `import torch` that all of them contain. With
--other PATH, the root of another checkout, it does the same works in turns with this one. What is told is the median of
wall seconds and of processor seconds (of the process and its children), which other work on the machine hardly moves.

    python benchmarks/first_seconds.py
    python benchmarks/first_seconds.py --other PATH
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import arguments, prepare, save, show

ROOT = Path(__file__).parents[1]
TRAIN = ("train", "gpt", "--recipe", "tiny", "--length", "64", "--batch-size", "4")
BUILD = "import kinformer; kinformer.build('gpt', recipe='tiny')"


def works(run: Path, scratch: Path) -> dict[str, Sequence[str]]:
    """The words behind ``python`` of each work; ``run`` is a trained run, ``scratch`` a place for another."""
    command = ("-m", "kinformer")
    return {
        "import torch": ("-c", "import torch"),
        "import kinformer": ("-c", "import kinformer"),
        "kinformer --help": (*command, "--help"),
        "build a tiny gpt": ("-c", BUILD),
        "generate 20 tokens": (*command, "generate", str(run), "--prompt", "The", "--max-new-tokens", "20"),
        "evaluate a tiny run": (*command, "evaluate", str(run), "--max-bytes", "20000"),
        "train 20 steps": (*command, *TRAIN, "--steps", "20", "--out", str(scratch)),
    }


def timed(words: Sequence[str], source: Path, threads: int | None) -> tuple[float, float]:
    """Wall seconds and processor seconds of ``python WORDS`` with the package in ``source``."""
    environment = os.environ | {"PYTHONPATH": str(source / "src")}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    begun, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - begun, os.times()
    if done.returncode:
        raise SystemExit(f"python {' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, spent


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--other", type=Path, help="the root of another checkout, to compare with")
    options = prepare(parser)
    rounds = options.rounds or (1 if options.quick else 7)
    sources = {"this": ROOT} | ({"other": options.other.resolve()} if options.other else {})
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / f"run-{name}" for name in sources}
        for name, source in sources.items():
            timed(("-m", "kinformer", *TRAIN, "--steps", "20", "--out", str(runs[name])), source, options.threads)
        shuffled = random.Random(0)
        for number in range(rounds):
            for name, source in shuffled.sample(list(sources.items()), len(sources)):
                for work, words in works(runs[name], Path(folder) / f"new-{name}-{number}").items():
                    measured.setdefault(work, {}).setdefault(name, []).append(timed(words, source, options.threads))
    rows: list[dict[str, Any]] = []
    for work, by_source in measured.items():
        row: dict[str, Any] = {"work": work}
        for name, pairs in by_source.items():
            wall, spent = zip(*pairs, strict=True)
            row[name] = {"seconds": statistics.median(wall), "processor_seconds": statistics.median(spent)}
        rows.append(row)
    header = ["work", *(f"{name}, {unit}" for name in sources for unit in ("s", "processor s"))]
    table = [[row["work"], *(value for name in sources for value in row[name].values())] for row in rows]
    show("the first seconds", header, table)
    save(options, "first_seconds", {"rounds": rounds, "works": rows})


if __name__ == "__main__":
    main()
