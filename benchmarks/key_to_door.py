"""Key-to-Door from random walks alone: how often is the door opened with the key, by the number of walks?

After Chen et al. 2021, section 5.4 and table 5. A Decision Transformer and, beside it, cloned behaviour learn from the
same walks, of which 3 % succeed; both act in new episodes, the former asked for a return of 1. Other than in the paper,
walks that succeed are drawn more often (--return-weight), which takes fewer steps; the clone sees all alike. Each
number of walks is tried with three seeds, of walks and of training. Run folders in --runs that exist already go on
where they were stopped:

    python benchmarks/key_to_door.py --runs runs/doors
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show, train

WALKS, SEEDS, EPISODES = (1000, 10_000), 3, 200
RECIPE = (
    "--recipe", "tiny", "--set", "layers.*.dropout=0.1", "--length", 6, "--batch-size", 512, "--lr", 3e-3,
    "--validate-every", 0, "--return-weight", 4,
)  # fmt: skip
ACT = ("--target", 1, "--action-temperature", 0)


def success(walks: int, seed: int, folder: Path, options: Any) -> dict[str, Any]:
    """One run, trained unless it is there, and what it and the clone reach."""
    out = folder / f"{walks}-{seed}"
    threads = ("--threads", options.threads) if options.threads else ()
    data = ("--data", "key-to-door", "--trajectories", walks, "--walk-seed", seed, "--seed", seed)
    train("decision", out, options.threads, *data, *RECIPE, "--steps", options.steps, *options.further)
    found = kinformer("evaluate", out, *ACT, "--episodes", options.episodes, *threads)
    drawn = kinformer("evaluate", out, "--target", 1, "--episodes", options.episodes, "--cloning-steps", 0, *threads)
    run = {
        "walks": walks, "seed": seed, "success": found["return_at_1"], "cloning": found["cloning"]["mean"],
        "success_drawn": drawn["return_at_1"], "walks_that_succeed": found["data_mean"],
        "context_steps": found["context_steps"], "steps": options.steps,
    }  # fmt: skip
    print(f"{walks} walks, seed {seed}: {run['success']:.1%} (cloned behaviour {run['cloning']:.1%})", flush=True)
    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--walks", type=int, nargs="+", default=list(WALKS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="that are acted")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.walks, options.seeds, options.steps, options.episodes = [50], 1, 4, 4
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        runs = [success(walks, seed, folder, options) for walks in options.walks for seed in range(options.seeds)]
    names = ("success", "success_drawn", "cloning", "walks_that_succeed")
    means = [
        {"walks": walks} | {name: statistics.mean(run[name] for run in runs if run["walks"] == walks) for name in names}
        for walks in options.walks
    ]
    header = ("walks", "success, greedy", "success, drawn", "cloned behaviour", "walks that succeed")
    show("Key-to-Door, mean over seeds", header, [[str(row["walks"]), *(row[name] for name in names)] for row in means])
    save(options, "key_to_door", {"recipe": list(RECIPE), "means": means, "runs": runs})


if __name__ == "__main__":
    main()
