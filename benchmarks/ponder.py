"""Where do tokens of a Universal Transformer stop thinking, what does that save, and does it solve longer problems?

Trains three models on problems of an algorithm on digits, by one recipe, with one position in attention (RoPE unless
--position says another) and no other, for each of three seeds: ``act``, one layer that every token applies up to --most
times, as its ACT decides; ``fixed``, that layer always so often; ``stack``, three layers (gpt) of as many parameters in
all. Then

* measures how many problems and tokens of answers are right, in training's lengths and beyond;
* tells ``act``'s steps by the token's place in the answer, and in an addition by how far the carry has come;
* times reading --rows problems and answers at once, and answering one problem token by token, ``act`` and ``fixed`` in
  turns.

Run folders in --runs that exist already are gone on with, or only measured:

    python benchmarks/ponder.py --algorithm reverse --digits 1-10 --runs runs/ponder
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import Contestant, arguments, interleave, kinformer, prepare, save, sets, show, train
from kinformer.generation.generate import generate
from kinformer.lab.evaluation.depths import noting_depths
from kinformer.lab.runs.run import open_run

SEEDS, ROUNDS = (0, 1, 2), 9
PLAIN = {"dim": 64, "position.kind": "none"}
UNIVERSAL = PLAIN | {"layers.*.feed_forward.hidden_dim": 1024}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "act": ("universal", UNIVERSAL | {"stack.halting.bias": -1}),
    "fixed": ("universal", UNIVERSAL | {"stack.halting": "null"}),
    "stack": ("gpt", PLAIN | {"layers": 3, "layers.*.feed_forward.hidden_dim": 256}),
}
TRAINING = ("--optimizer", "muon", "--lr", 1e-2, "--batch-size", 64)
SETTINGS = ("algorithm", "position", "digits", "steps", "most", "length", "rows")
MEASURED = ("sequence_accuracy", "accuracy", "bits_per_label", "ponder_steps", "by_digits")


def trained(name: str, seed: int, options: Any) -> Path:
    """The run of one model, begun, gone on with or already there."""
    folder = options.runs / f"{options.algorithm}-{name}-{seed}"
    member, changes = MODELS[name]
    changes = changes | {"layers.*.mixer.position.kind": options.position}
    steps = {"stack.steps": options.most} if member == "universal" else {}
    task = ("--task", "algorithm", "--algorithm", options.algorithm, "--digits", options.digits)
    budget = ("--length", options.length, "--steps", options.steps, "--seed", seed)
    words = ("--recipe", "benchmark", *sets(changes | steps), *TRAINING, *task, *budget)
    train(member, folder, torch.get_num_threads(), *words)
    return folder


def measured(folder: Path, options: Any) -> dict[str, Any]:
    """What evaluate says of a run, and how many parameters it has."""
    lengths = ("--at-digits", options.at_digits, "--problems", options.rows)
    told = kinformer("evaluate", folder, *lengths, "--threads", torch.get_num_threads())
    parameters = sum(each.numel() for each in open_run(folder).model().parameters())
    return {name: told[name] for name in MEASURED if name in told} | {"parameters": parameters}


def timed(folders: dict[str, Path], options: Any) -> dict[str, Any]:
    """Seconds of each model for problems of training's longest, read at once and answered one by one, and the steps
    that a token took meanwhile."""
    runs = {name: open_run(folder) for name, folder in folders.items()}
    models = {name: run.model() for name, run in runs.items()}
    data = runs["act"].options.data
    problems = data.rows("test", 0, options.rows, digits=data.most)
    tokens = torch.from_numpy(problems.tokens)
    asked = int((problems.labels >= 0).sum(1)[0])
    prompt = tokens[:1, : tokens.shape[1] - asked + 1]

    def read(name: str) -> None:
        with torch.no_grad():
            models[name](tokens)

    def answer(name: str) -> None:
        generate(models[name], prompt, max_new_tokens=asked, temperature=0.0)

    found = {}
    for what, step, count in (("read", read, tokens.numel()), ("answer", answer, asked)):
        contestants = [Contestant(name, partial(step, name)) for name in models]
        interleave(contestants, options.rounds or ROUNDS)
        seconds = {each.name: each.median for each in contestants}
        found[what] = {"seconds_per_token": {name: each / count for name, each in seconds.items()}}
        found[what]["speedup"] = seconds["fixed"] / seconds["act"]
    return found | {"steps_per_token": steps(models["act"], tokens)}


def steps(model: Any, tokens: torch.Tensor) -> float:
    """Mean steps of ``tokens`` in a model that lets them halt."""
    with torch.no_grad(), noting_depths(model) as depths:
        model(tokens)
    assert depths is not None
    return float(depths.last.double().mean())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--algorithm", choices=("copy", "reverse", "addition", "parity"), default="reverse")
    parser.add_argument("--position", default="rope", help="in attention: rope, alibi, t5, ...")
    parser.add_argument("--digits", default="1-10", help="of training's problems")
    parser.add_argument("--at-digits", default="5,10,12,15,20", help="of the measured problems")
    parser.add_argument("--length", type=int, default=40, help="tokens of a row, at least those of the longest problem")
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--most", type=int, default=6, help="steps of the universal stack at most")
    parser.add_argument("--rows", type=int, default=256, help="problems that are measured, of each number of digits")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    options = prepare(parser)
    seeds = SEEDS
    if options.quick:
        options.steps, options.rows, options.rounds, seeds = 2, 8, 1, (0,)
    with tempfile.TemporaryDirectory() as folder:
        options.runs = options.runs or Path(folder)
        measure(options, seeds)


def measure(options: Any, seeds: tuple[int, ...]) -> None:
    """All of it."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
    times = []
    for seed in seeds:
        folders = {name: trained(name, seed, options) for name in MODELS}
        for name, folder in folders.items():
            runs[name].append(measured(folder, options) | {"seed": seed})
        times.append(timed({name: folders[name] for name in ("act", "fixed")}, options) | {"seed": seed})
    rows = []
    for name, found in runs.items():
        by_digits = zip(*(each["by_digits"] for each in found), strict=True)
        rows.append([name, *(statistics.mean(each["accuracy"] for each in same) for same in by_digits)])
        rows[-1].append(statistics.mean(each["ponder_steps"] for each in found) if "ponder_steps" in found[0] else None)
    header = ("tokens right", *(f"{digits} digits" for digits in options.at_digits.split(",")), "steps per token")
    show(f"{options.algorithm}, trained on {options.digits} digits, mean of {len(seeds)} seeds", header, rows)
    speeds = [
        [each["seed"], each["steps_per_token"], each["read"]["speedup"], each["answer"]["speedup"]] for each in times
    ]
    show("act against fixed", ("seed", "steps per token", "read, times as fast", "answer, times as fast"), speeds)
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"models": {name: {"member": member, "set": changes} for name, (member, changes) in MODELS.items()}}
    name = "ponder" if options.algorithm == "reverse" else f"ponder_{options.algorithm}"
    save(options, name, {"settings": settings, "training": list(TRAINING), "runs": runs, "times": times})


if __name__ == "__main__":
    main()
