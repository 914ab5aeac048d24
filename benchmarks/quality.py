"""What does each member learn in the same budget? Trained and measured through the command line, on your own text.

Every member is trained with every seed by `kinformer train` and measured on the held-out tenth by `kinformer evaluate`
(bits per byte, in windows of the training length unless it was trained by segments). Run folders in --runs that exist
already are only measured. The budget is --steps or
--minutes; extra options of `kinformer train` stand after --:

    python benchmarks/quality.py --data book.txt --minutes 5 --seeds 3 -- --recipe small --length 256
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show, train

MEMBERS = ("gpt", "linear-transformer", "fast-weights")
TRAINED = ("steps", "parameters", "seconds", "tokens_per_second", "best_step")
MEASURED = ("bits_per_byte", "context", "ngram_bits_per_byte")


def measure(member: str, seed: int, folder: Path, options: Any) -> dict[str, Any]:
    """Train and evaluate one member with one seed."""
    budget = ("--minutes", options.minutes) if options.minutes else ("--steps", options.steps)
    data = ("--data", options.data, "--holdout", 0.1)
    threads = ("--threads", options.threads) if options.threads else ()
    trained = train(member, folder, options.threads, *data, "--seed", seed, *budget, *options.further)
    baseline = ("--baseline",) if seed == 0 and member == MEMBERS[0] else ()
    measured = kinformer("evaluate", folder, *threads, *baseline)
    run = {"member": member, "seed": seed} | {name: trained[name] for name in TRAINED}
    run |= {name: measured[name] for name in MEASURED} | {"data": measured["data"]}
    run["training"] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
    print(f"{member} seed {seed}: {run['bits_per_byte']:.4f} bits per byte after {run['steps']} steps", flush=True)
    return run


def each_run(options: Any, measure: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``measure(member, seed, folder, options)`` tells of every seed of every member."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        return [
            measure(member, seed, folder / f"{member}-{seed}", options)
            for seed in range(options.seeds)
            for member in options.members
        ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--members", nargs="+", default=list(MEMBERS))
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="the budget of each run, instead of --steps")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.steps, options.minutes, options.seeds = 20, None, 1
        options.further = ["--recipe", "tiny", "--length", "64", *options.further]
    runs = each_run(options, measure)
    table = []
    for member in options.members:
        bits = [run["bits_per_byte"] for run in runs if run["member"] == member]
        table.append([member, statistics.mean(bits), max(bits) - min(bits), " ".join(f"{each:.4f}" for each in bits)])
    show("held-out bits per byte", ("member", "mean", "spread", "by seed"), table)
    baseline = next((run["ngram_bits_per_byte"] for run in runs if run["ngram_bits_per_byte"]), None)
    if baseline is not None:
        print(f"a 5-gram model of the training data has {baseline:.4f}")
    save(options, "quality", {"runs": runs})


if __name__ == "__main__":
    main()
