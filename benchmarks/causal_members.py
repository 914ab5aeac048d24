"""Which causal member learns most of a book in equal minutes, at equal parameters?

    python benchmarks/causal_members.py --data book.txt --minutes 1.5 --threads 1 --runs FOLDER
    python benchmarks/causal_members.py --data book.txt --threads 1 --add results/causal_members.json --seed 1

Every causal member of text is trained alike, as its `small` recipe has it, the width fitted to the budget of
parameters. Steps are what the minutes buy at the speeds that `kinformer compare` measures in turns, so that other work
on the machine slows the runs and changes no result. What FOLDER holds is not computed again. ``--add`` trains further
seeds with the steps of a result file, which it writes anew after every run; it may be stopped and continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, sets, show
from kinformer.family.table import MEMBERS

TRAINING = (
    "--sweep", 0, "--lr", 0.01, "--parameters", 800_000, "--train-tokenizer", 4096, "--ema", 0.07, "--batch-size", 2,
    "--length", 256, "--max-bytes", 100_000, "--contexts", "1x", "--lengths", "512",
)  # fmt: skip

ELSEWHERE = ("decision", "vanilla", "knn-lm", "spalm", "tensorized")
"""Causal members that learn something else (actions; translation), are a plain decoder where there is no datastore yet,
or have a tensor that grows with the length beyond the budget of parameters."""
CHANGES = {"mixtral:layers.*.feed_forward.num_experts": 4, "mixtral:layers": 3}
"""What lets a recipe meet the budget."""


def causal_members() -> list[str]:
    """The causal members that are trained on text, plain attention first."""
    names = [name for name, member in MEMBERS.items() if member.causal and name not in ELSEWHERE]
    return sorted(names, key=lambda name: name != "gpt")


def compared(options: argparse.Namespace, folder: Path, members: list[str], *more: Any) -> dict[str, Any]:
    """The report of ``kinformer compare`` on them."""
    threads = ("--threads", options.threads) if options.threads else ()
    changes = {path: value for path, value in CHANGES.items() if path.partition(":")[0] in members}
    words = (*members, *sets(changes), "--data", options.data, "--out", folder, *TRAINING, *more, *threads)
    return kinformer("compare", *words)


def begun(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The result of the first seeds, a row for each member."""
    budget = ("--steps", 3) if options.quick else ("--minutes", options.minutes)
    seeds = ("--seed", options.seed, "--seeds", options.seeds, "--rounds", options.rounds or 3)
    report = compared(options, folder, options.members or causal_members(), *budget, *seeds)
    rows = [row_of(entrant, range(options.seed, options.seed + options.seeds)) for entrant in report["entrants"]]
    facts = {name: report[name] for name in ("data", "baselines", "budget", "settings")}
    return {"minutes": options.minutes, "members": rows} | facts


def row_of(entrant: dict[str, Any], seeds: range) -> dict[str, Any]:
    """What a member's runs gave, or why there are none."""
    row = {"name": entrant["name"], "parameters": entrant["parameters"], "error": entrant["error"]}
    if not entrant["runs"]:
        return row
    return row | {
        "bits_per_byte": {str(seed): run["value"] for seed, run in zip(seeds, entrant["runs"], strict=True)},
        "steps": entrant["runs"][0]["steps"],
        "seconds_per_step": entrant["training"]["seconds"],
        "state_bytes": entrant["state_bytes"],
        "generation": entrant["generation"] and entrant["generation"]["points"],
    }


def add(options: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
    """Train the seeds that ``result`` lacks, and save it after each."""
    for seed in range(options.seed, options.seed + options.seeds):
        for row in result["members"]:
            if (
                row["error"]
                or str(seed) in row["bits_per_byte"]
                or row["name"] not in (options.members or [row["name"]])
            ):
                continue
            budget = ("--steps", row["steps"], "--seed", seed, "--seeds", 1, "--rounds", 1)
            runs = compared(options, folder / f"{row['name']}-{seed}", [row["name"]], *budget)["entrants"][0]["runs"]
            row["bits_per_byte"][str(seed)] = runs[0]["value"]
            save(options, "causal_members", result)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--members", nargs="+", help="only these")
    parser.add_argument("--minutes", type=float, default=1.5, help="the budget of each run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--runs", type=Path, help="keep what is computed here")
    parser.add_argument("--add", type=Path, help="add seeds to this result file")
    options = prepare(parser)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        if options.add:
            result = json.loads(options.add.read_text(encoding="utf-8"))
            add(options, folder, result)
        else:
            result = begun(options, folder)
    table = []
    for row in result["members"]:
        if not row["error"]:
            bits = list(row["bits_per_byte"].values())
            table.append([row["name"], statistics.mean(bits), max(bits) - min(bits), len(bits), row["steps"]])
    show(
        "bits per byte on held-out text",
        ("member", "mean", "spread", "seeds", "steps"),
        sorted(table, key=lambda x: x[1]),
    )
    save(options, "causal_members", result)


if __name__ == "__main__":
    main()
