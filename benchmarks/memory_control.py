"""Who remembers a sign until the corridor ends? The T-maze, by recurrent proximal policy optimisation.

A sign in the first cell says which way to turn at the end of a corridor, where nothing is to be seen of it: whoever
does not remember gets 0 on average (chance), who does gets 1. All models have --layers of width 32 and learn from as
many updates by one recipe; those with a segment memory have segments that are shorter than an episode, so that the sign
is in the memory when it is needed. A run has solved the maze when its mean return of new episodes is above 0.9. Run
folders in --runs that exist already go on where they were stopped:

    python benchmarks/memory_control.py --runs runs/maze
    python benchmarks/memory_control.py --runs runs/deep --layers 6 --lr 5e-3 --name memory_control_deep
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import kinformer
from common import arguments, prepare, save, show

SEEDS, EPISODES, SOLVED, ENV = (0, 1, 2), 200, 0.9, "t-maze:10"
SEGMENTS = {"layers.*.mixer.segment": 8, "layers.*.mixer.memory": 16, "layers.*.mixer.impl": "reference"}
ONE_STEP = {"layers.*.mixer.pattern": {"kind": "local", "window": 1}, "position": "none"}
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GTrXL": ("gtrxl", SEGMENTS),
    "no memory (a window of 1)": ("gpt", ONE_STEP),
    "LSTM": ("gpt", {"layers.*.mixer": "lstm", "position": "none"}),
    "Transformer-XL": ("transformer-xl", SEGMENTS),
    "GTrXL, gate bias 0": ("gtrxl", SEGMENTS | {"layers.*.residual.bias": 0.0}),
    "TrXL-I (no gates)": ("gtrxl", SEGMENTS | {"layers.*.residual": "reordered", "norm": "layer_norm"}),
    "GPT (the episode)": ("gpt", {}),
    "GPT, a window of 16": ("gpt", {"layers.*.mixer.pattern": {"kind": "local", "window": 16}}),
    "Linear Transformer": ("linear-transformer", {}),
}
RECIPE = {
    "task": "control", "recipe": "tiny", "length": 16, "batch_size": 64, "validate_every": 0, "log_every": 20,
}  # fmt: skip


def acted(name: str, seed: int, folder: Path, options: Any) -> dict[str, Any]:
    """One run, trained unless it is there, and its mean return."""
    member, changes = CONTESTANTS[name]
    out = folder / f"{list(CONTESTANTS).index(name)}-{seed}"
    machine = {"threads": options.threads, "quiet": True}
    if (out / "config.json").exists():
        kinformer.train(member, out=out, resume=True, **machine)
    else:
        own = {"env": options.env, "steps": options.steps, "seed": seed, "lr": options.lr}
        kinformer.train(member, out=out, **RECIPE, **own, set={"layers": options.layers} | changes, **machine)
    found = kinformer.evaluate(out, episodes=options.episodes, threads=options.threads).facts
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    above = (line["environment_steps"] for line in log if (line.get("mean_return") or 0) > SOLVED)
    run = {"name": name, "seed": seed, "mean_return": found["mean_return"], "confidence": found["confidence"]}
    run |= {"solved_after": next(above, None), "environment_steps": log[-1].get("environment_steps")}
    print(f"{name}, seed {seed}: {run['mean_return']:.3f}, above {SOLVED} after {run['solved_after']}", flush=True)
    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--env", default=ENV)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=300, help="updates")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--name", default="memory_control", help="of the result file")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="that are acted")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    options = prepare(parser)
    if options.quick:
        options.seeds, options.steps, options.episodes = [0], 4, 4
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        runs = [acted(name, seed, folder, options) for name in options.only for seed in options.seeds]
    means = []
    for name in options.only:
        own = [run for run in runs if run["name"] == name]
        returns = [run["mean_return"] for run in own]
        share = statistics.mean(each > SOLVED for each in returns)
        after = [run["solved_after"] for run in own if run["solved_after"]]
        means.append(
            {"name": name, "solved": share, "least": min(returns), "mean": statistics.mean(returns)}
            | {"solved_after": statistics.median(after) if after else None}
        )
    header = ("model", "seeds that solve it", "least return", "mean return", "environment steps until then")
    rows = [[each["name"], each["solved"], each["least"], each["mean"], each["solved_after"] or "-"] for each in means]
    show(f"{options.env}, {len(options.seeds)} seeds", header, rows)
    recipe = RECIPE | {"layers": options.layers, "lr": options.lr, "steps": options.steps}
    save(options, options.name, {"env": options.env, "recipe": recipe, "means": means, "runs": runs})


if __name__ == "__main__":
    main()
