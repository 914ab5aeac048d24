"""What is a memory beyond the segment worth? A plain decoder, a window, Transformer-XL and the Compressive Transformer.

All have equally many parameters (their feed-forwards are made wider until they have) and norms before their sublayers,
read bytes of your own text with the same seeds, and get the same --minutes, or --steps in proportion to their speed,
through `kinformer train`. The plain decoder learns in windows of --segment tokens and is measured in them as they are
and with half of each repeated; the others learn by consecutive segments and are measured with their state carried,
those with a memory also with longer ones than they learnt with. Transformer-XL has --memory slots, the Compressive
Transformer as many, half of them means of four older ones, which cost no weights.

The seconds of a training step are measured in turns at the end: steps times seconds is the time that a run takes alone.
Run folders in --runs that exist already are only measured. Extra options of `kinformer train` stand after --:

    python benchmarks/memory_quality.py --data book.txt --minutes 20 --seeds 3 -- --batch-size 16
"""

from __future__ import annotations

import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from common import Contestant, arguments, interleave, kinformer, prepare, save, sets, show, train
from kinformer.family.build import configure
from kinformer.lab.runs.rows import plan_of
from kinformer.lab.runs.run import open_run
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.loop import Trainer
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError

MEMBERS = ("gpt", "local", "transformer-xl", "compressive")
LONGER = (2, 4)


def shape(member: str, options: Any) -> dict[str, Any]:
    """The changes that give a member the benchmark's segment."""
    size = options.segment
    changes: dict[str, Any] = {"dim": options.dim} if options.dim else {}
    if options.heads:
        changes["layers.*.mixer.num_heads"] = options.heads
    if member == "gpt":
        return changes | {"position.max_length": size}
    if member == "local":
        return changes | {"layers.*.mixer.pattern.window": 2 * size}
    slots = options.memory or size // 2
    changes |= {"layers.*.residual": "pre", "norm": "layer_norm", "layers.*.mixer.segment": size}
    if member == "transformer-xl":
        return changes | {"layers.*.mixer.memory": slots}
    queues = {"layers.*.mixer.memory": slots // 2, "layers.*.mixer.compressed": slots // 2}
    return changes | queues | {"layers.*.mixer.compression": "pool"}


def parameters(member: str, options: Any, changes: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = configure(member, options.recipe, set=changes).build()
    return sum(parameter.numel() for parameter in model.parameters())


def alike(options: Any) -> dict[str, dict[str, Any]]:
    """Changes by member that give all as many parameters as the largest has, up to one unit of the feed-forwards."""
    found = {member: shape(member, options) for member in options.members}
    most = max(
        parameters(member, options, changes | {"layers.*.feed_forward.hidden_dim": _hidden(member, options)})
        for member, changes in found.items()
    )
    for member, changes in found.items():
        hidden = _hidden(member, options)
        wider = changes | {"layers.*.feed_forward.hidden_dim": hidden + 1}
        least = parameters(member, options, changes | {"layers.*.feed_forward.hidden_dim": hidden})
        unit = parameters(member, options, wider) - least
        changes["layers.*.feed_forward.hidden_dim"] = hidden + round((most - least) / unit)
    return found


def _hidden(member: str, options: Any) -> int:
    """The recipe's feed-forward at the width that is asked for."""
    own = configure(member, options.recipe)
    return own.layers[0].feed_forward.hidden_dim * (options.dim or own.dim) // own.dim


def reach(folder: Path) -> dict[str, int]:
    """How many tokens before it a token sees in one layer at most, and through all layers."""
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"]["layers"]
    spans = []
    for mixer in (layer["mixer"] for layer in layers):
        if mixer["kind"] == "softmax":
            window = mixer["pattern"].get("window")
            spans.append(None if window is None else window - 1)
        else:
            span = mixer["segment"] - 1 + mixer["memory"]
            spans.append(span + mixer.get("compressed", 0) * mixer.get("compression", {}).get("rate", 0))
    length = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]["length"]
    if None in spans:
        return {"layer": length - 1, "model": length - 1}
    return {"layer": max(spans), "model": sum(spans)}


def measure(member: str, seed: int, folder: Path, changes: dict[str, Any], options: Any) -> dict[str, Any]:
    """Train and measure one member with one seed."""
    threads = ("--threads", options.threads) if options.threads else ()
    limit = ("--max-bytes", options.max_bytes) if options.max_bytes else ()
    steps = dict(zip(options.members, options.steps * len(options.members), strict=False))[member]
    budget = ("--minutes", options.minutes) if options.minutes else ("--steps", steps)
    segments = () if member == "gpt" else ("--segments",)
    new = ("--data", options.data, "--recipe", options.recipe, "--length", options.segment, *segments, *sets(changes))
    trained = train(member, folder, options.threads, *new, "--seed", seed, *budget, *options.further)
    ways: dict[str, tuple[Any, ...]] = {"as trained": ()}
    if member == "gpt":
        ways["half of each window repeated"] = ("--context", options.segment, "--overlap", 0.5)
    elif member != "local":
        own = changes["layers.*.mixer.memory"]
        for times in LONGER:
            ways[f"memory x {times}"] = ("--set", f"layers.*.mixer.memory={times * own}")
    run = {"member": member, "seed": seed, "set": changes, "reach": reach(folder)}
    run |= {name: trained[name] for name in ("parameters", "steps", "seconds", "tokens_per_second")}
    run["bits_per_byte"] = {
        way: kinformer("evaluate", folder, *threads, *limit, *further)["bits_per_byte"] for way, further in ways.items()
    }
    bits = ", ".join(f"{way} {value:.4f}" for way, value in run["bits_per_byte"].items())
    print(f"{member} seed {seed}: {bits} ({run['steps']} steps, {run['parameters']:,} parameters)", flush=True)
    return run


def pace(folders: dict[str, Path], rounds: int) -> dict[str, float]:
    """Seconds of a training step of each run, in turns."""
    contestants = []
    with tempfile.TemporaryDirectory() as scratch:
        for member, folder in folders.items():
            run = open_run(folder)
            settings, model = Settings(**run.training), run.build()
            data = run.task.data_module(plan_of(run, settings))
            objective = run.task.objective(settings.objective, model, data)
            trainer = Trainer(model, data, objective, settings, Path(scratch) / member, Group(torch.device("cpu")))
            contestants.append(Contestant(member, partial(_step, trainer, count()), fast=True))
        interleave(contestants, rounds, warm_up=3)
    return {contestant.name: contestant.median for contestant in contestants}


def _step(trainer: Trainer, numbers: count[int]) -> float:
    return float(trainer.update(next(numbers), 0.0, 0.0).loss)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--members", nargs="+", default=list(MEMBERS), choices=MEMBERS)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--dim", type=int, help="the width, if not the recipe's; feed-forwards follow")
    parser.add_argument("--heads", type=int, help="heads of a layer, if not the recipe's")
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--memory", type=int, help="slots beyond the segment (half of it if not given)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, nargs="+", default=[2000], help="of all, or of each of --members")
    parser.add_argument("--minutes", type=float, help="the budget of each run, instead of --steps")
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--max-bytes", type=int, help="measure on the first so many bytes only")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.recipe, options.segment, options.steps, options.minutes, options.seeds = "tiny", 16, [10], None, 1
        options.max_bytes = options.max_bytes or 500
    try:
        changes = alike(options)
    except KinformerError as error:
        raise SystemExit(str(error)) from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        pairs = [(member, seed) for seed in range(options.seeds) for member in options.members]

        def one(pair: tuple[str, int]) -> dict[str, Any]:
            member, seed = pair
            return measure(member, seed, folder / f"{member}-{seed}", changes[member], options)

        with ThreadPoolExecutor(options.jobs) as pool:
            runs = list(pool.map(one, pairs))
        seconds = pace({member: folder / f"{member}-0" for member in options.members}, options.rounds or 20)
    steps = {run["member"]: run["steps"] for run in runs}
    table: list[list[Any]] = [[member, 1000 * each, steps[member] * each / 60] for member, each in seconds.items()]
    show("a training step, in turns", ("member", "ms", "minutes of a run alone"), table)
    table = []
    for member in options.members:
        own = [run for run in runs if run["member"] == member]
        for way in own[0]["bits_per_byte"]:
            bits = [run["bits_per_byte"][way] for run in own]
            spread = max(bits) - min(bits)
            table.append([f"{member}, {way}", own[0]["reach"]["layer"], statistics.mean(bits), spread])
    show("held-out bits per byte", ("member", "reach of a layer", "mean", "spread"), table)
    names = ("recipe", "dim", "heads", "segment", "memory", "steps", "minutes", "jobs", "max_bytes", "further")
    settings = {"data": Path(options.data).name} | {name: getattr(options, name) for name in names}
    save(options, "memory_quality", {"settings": settings, "step_seconds": seconds, "runs": runs})


if __name__ == "__main__":
    main()
