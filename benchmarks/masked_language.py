"""How well does each encoder predict masked bytes after the same time? Beside what counting finds of the same bytes.

Every member is trained with every seed by `kinformer train` for --minutes and measured by `kinformer evaluate` on the
test split: bits per masked byte, with the bits of the very same bytes by their frequency (unigram) and by their
frequency after the true byte before them (bigram). Run folders in --runs that exist already are only measured. Extra
options of `kinformer train` stand after --:

    python benchmarks/masked_language.py --members bert longformer --minutes 5 -- --length 512 --lr 5e-4
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show, train
from quality import each_run

MEMBERS = ("bert",)
TRAINED = ("steps", "parameters", "seconds", "tokens_per_second", "best_step")
MEASURED = (
    "bits_per_masked_byte",
    "accuracy",
    "unigram_bits",
    "bigram_bits",
    "masked",
    "length",
    "whole_words",
    "data",
)


def measure(member: str, seed: int, folder: Path, options: Any) -> dict[str, Any]:
    """Train and evaluate one member with one seed."""
    threads = ("--threads", options.threads) if options.threads else ()
    budget = ("--minutes", options.minutes) if options.minutes else ("--steps", options.steps)
    new = ("--task", "mlm", "--data", options.data, "--seed", seed, *budget, *options.further)
    trained = train(member, folder, options.threads, *new)
    measured = kinformer(
        "evaluate", folder, *threads, *(("--max-bytes", options.max_bytes) if options.max_bytes else ())
    )
    run = {"member": member, "seed": seed} | {name: trained[name] for name in TRAINED}
    run |= {name: measured[name] for name in MEASURED}
    run["training"] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
    print(
        f"{member} seed {seed}: {run['bits_per_masked_byte']:.4f} bits per masked byte after {run['steps']} steps "
        f"(unigram {run['unigram_bits']:.4f}, bigram {run['bigram_bits']:.4f})",
        flush=True,
    )
    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--members", nargs="+", default=list(MEMBERS))
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run")
    parser.add_argument("--max-bytes", type=int, help="measure on the first so many bytes only")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    options.steps = 20
    if options.quick:
        options.minutes, options.seeds, options.max_bytes = None, 1, 20_000
        options.further = ["--recipe", "tiny", "--length", "64", "--validation-tokens", "2000", *options.further]
    runs = each_run(options, measure)
    table = []
    for member in options.members:
        own = [run for run in runs if run["member"] == member]
        bits = [run["bits_per_masked_byte"] for run in own]
        found = statistics.mean(run["accuracy"] for run in own)
        table.append(
            [member, statistics.mean(bits), max(bits) - min(bits), found, statistics.mean(r["steps"] for r in own)]
        )
    for name in ("bigram", "unigram"):
        table.append([name, statistics.mean(run[f"{name}_bits"] for run in runs), None, None, None])
    show("bits per masked byte of the test split", ("member", "mean", "spread", "found", "steps"), table)
    save(options, "masked_language", {"runs": runs})


if __name__ == "__main__":
    main()
