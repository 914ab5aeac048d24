"""What should so many minutes be spent on? Settings of `kinformer train` against each other at one budget of time.

Every setting is a line of flags; the first one is what `--minutes` chooses by itself. How fast a step of each is, is
measured first, in turns; then each makes the steps that fit into the budget at that speed. So the result is that of a
quiet machine, whatever else it does later, and the settings can be trained one after the other. With --steps all make
so many instead, which a busy machine can tell apart too. With --processor the budget is processor time of a thread, and
the speed is the median of updates in turns, all in this process: it needs no quiet machine.

The result is written after every setting. A call with --resume and the same --out goes on with it: speeds that it has
are not measured again, nor settings trained that have their bits. So speeds can be measured on quiet cores (--measure)
and the settings trained later, on a thread each.

    python benchmarks/minutes.py --data book.txt --minutes 1
    python benchmarks/minutes.py --data book.txt --minutes 4 --member local --settings my-settings.txt
    python benchmarks/minutes.py --data book.txt --minutes 1 --processor --threads 1 --only "4 rows" "4 rows, 3 layers"
"""

from __future__ import annotations

import json
import shlex
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import arguments, kinformer, medians, of_width, prepare, save, sets, show
from kinformer.lab.cli.form import parse
from kinformer.lab.cli.train import Train
from kinformer.lab.runs.create import open_planner
from kinformer.lab.runs.minutes import measured_update
from kinformer.runtime.process import begin_process

RECIPE = "--optimizer muon --lr 5e-3 --precision bf16-mixed --length 128 --batch-size 8"


def width(dim: int) -> str:
    """The flags of a model so wide, with heads of 64."""
    return " ".join(sets(of_width(dim)))


ROPE = "--set position=none --set layers.*.mixer.position=rope"
QK_NORM = "--set layers.*.mixer.projection=normalised"
ZERO = "--set initialisation.residual=zero"
SQUARED = "--set layers.*.feed_forward.activation=squared_relu"
LEARNED = f"{RECIPE} {width(128)} --train-tokenizer 4096"
USUAL = f"{LEARNED} {ROPE}"
FOUR = f"{USUAL} --batch-size 4 --ema 0.07"
SETTINGS = {
    "usual": USUAL,
    "learned positions": LEARNED,
    "bytes": f"{RECIPE} {width(128)} {ROPE}",
    "1,024 tokens": f"{USUAL} --train-tokenizer 1024",
    "2,048 tokens": f"{USUAL} --train-tokenizer 2048",
    "dim 64": f"{RECIPE} {width(64)} --train-tokenizer 4096 {ROPE}",
    "dim 192": f"{RECIPE} {width(192)} --train-tokenizer 4096 {ROPE}",
    "4 rows": f"{USUAL} --batch-size 4",
    "16 rows": f"{USUAL} --batch-size 16",
    "length 64": f"{USUAL} --length 64",
    "lr 1e-2": f"{USUAL} --lr 1e-2",
    "2 layers": f"{USUAL} --set layers=2",
    "QK-norm": f"{USUAL} {QK_NORM}",
    "zero outputs": f"{USUAL} {ZERO}",
    "QK-norm, zero outputs": f"{USUAL} {QK_NORM} {ZERO}",
    "squared ReLU": f"{USUAL} {SQUARED}",
    "QK-norm, zero outputs, squared ReLU": f"{USUAL} {QK_NORM} {ZERO} {SQUARED}",
    "learned positions, QK-norm": f"{LEARNED} {QK_NORM}",
    "learned positions, zero outputs": f"{LEARNED} {ZERO}",
    "learned positions, squared ReLU": f"{LEARNED} {SQUARED}",
    "untied": f"{USUAL} --set head.tied=false",
    "down to 0": f"{USUAL} --set training.min_lr_ratio=0",
    "adamw": f"{USUAL} --optimizer adamw --lr 3e-3",
    "dropout": f"{USUAL} --set layers.*.dropout=0.1",
    "one minute": FOUR,
    "one minute, exact GELU": f"{FOUR} --set layers.*.feed_forward.activation=gelu",
    "one minute, squared ReLU": f"{FOUR} {SQUARED}",
    "one minute, 3 layers": f"{FOUR} --set layers=3",
    "one minute, scaled embedding": f"{FOUR} --set input.scale=true",
    "one minute, untied": f"{FOUR} --set head.tied=false",
    "one minute, parallel": f"{FOUR} --set layers.*.kind=parallel",
    "one minute, value residual": f"{FOUR} --set layers.*.mixer.value_residual=true",
    "one minute, one kv head": f"{FOUR} --set layers.*.mixer.projection=grouped "
    "--set layers.*.mixer.projection.num_kv_heads=1",
    "one minute, softcap 15": f"{FOUR} --set head.softcap=15",
    "one minute, constant rate, ema 0.4": f"{FOUR} --schedule constant --ema 0.4",
    "nanoGPT's CPU recipe": "--set dim=128 --set layers.*.feed_forward.hidden_dim=512 --length 64 --batch-size 12 "
    "--optimizer adamw --lr 1e-3 --set training.beta2=0.99",
}
PROBE_STEPS = 24
COLUMNS = ("steps", "tokens_per_second", "bits_per_byte")


def trained(options: Any, flags: str, steps: int, *further: Any) -> tuple[dict[str, Any], float]:
    """Train so many steps; what the command says, and the held-out bits per byte."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", options.member, "--data", options.data, "--out", f"{folder}/run", "--steps", steps, *further]
        told = kinformer(*words, "--quiet", "--holdout", 0.1, *shlex.split(flags))
        if "--validate-every" in further:
            return told, 0.0
        return told, kinformer("evaluate", f"{folder}/run", "--quiet", "--holdout", 0.1)["bits_per_byte"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", required=True, help="the text")
    parser.add_argument("--minutes", type=float, default=1.0, help="the budget of every setting")
    parser.add_argument("--steps", type=int, help="of every setting, instead of a budget of time")
    parser.add_argument("--processor", action="store_true", help="the budget is processor time, not the clock's")
    parser.add_argument("--seed", type=int, default=0, help="of every setting")
    parser.add_argument("--member", default="gpt", help="a causal member")
    parser.add_argument("--settings", type=Path, help="lines of NAME: FLAGS, instead of those of this file")
    parser.add_argument("--only", nargs="*", help="only the settings of these names")
    parser.add_argument("--measure", action="store_true", help="measure the settings' speeds and train none")
    parser.add_argument("--resume", action="store_true", help="go on with the result in --out")
    options = prepare(parser)
    settings = dict(SETTINGS)
    if options.settings:
        settings = dict(line.split(": ", 1) for line in options.settings.read_text().splitlines() if line.strip())
    settings = {name: flags for name, flags in settings.items() if not options.only or name in options.only}
    found = json.loads(options.out.read_text(encoding="utf-8"))["settings"] if options.resume else {}
    result = {name: found.get(name, {"flags": flags}) for name, flags in settings.items()}
    if not options.steps:
        missing = [each for each in result.values() if "tokens_per_second" not in each]
        (measure_processor if options.processor else measure)(options, missing)
        keep(options, result)
    for name, each in result.items():
        if options.measure or "bits_per_byte" in each:
            continue
        steps = options.steps or (10 if options.quick else steps_in(60 * options.minutes, each))
        _, bits = trained(options, f"{each['flags']} --seed {options.seed}", steps)
        each |= {"steps": steps, "bits_per_byte": bits, "threads": torch.get_num_threads()}
        print(f"{name}: {steps} steps, {bits:.4f} bits per byte", flush=True)
        keep(options, result)
    budget = f"{options.steps} steps" if options.steps else f"{options.minutes:g} minutes"
    rows = [[name, *(each.get(column) for column in COLUMNS)] for name, each in result.items()]
    show(f"{options.member}, {budget}", ["setting", "steps", "tokens/s", "bits per byte"], rows)


def measure(options: Any, settings: list[dict[str, Any]]) -> None:
    """How fast steps of ``settings`` are, in turns: the fastest of each."""
    for _ in range(1 if options.quick else options.rounds or 3):
        for each in settings:
            told, _ = trained(options, each["flags"], PROBE_STEPS, "--validate-every", 0)
            each["tokens_per_second"] = max(each.get("tokens_per_second", 0.0), told["tokens_per_second"])


def measure_processor(options: Any, settings: list[dict[str, Any]]) -> None:
    """How many tokens a second of processor time steps of ``settings`` learn from, in turns in this process."""
    begin_process()
    with tempfile.TemporaryDirectory() as folder:
        steps = {}
        for each in settings:
            words = [options.member, "--data", options.data, "--out", f"{folder}/run", *shlex.split(each["flags"])]
            asked = parse(Train, "Options", words, prog="train", description="")
            planner, asked = open_planner(asked)
            update, _ = measured_update(planner.plan(asked), planner.task, "cpu")
            steps[each["flags"]] = partial(update, 0, 0.0, 0.0)
        taken = medians(steps, 1 if options.quick else options.rounds or PROBE_STEPS, True)
    for each in settings:
        each["tokens_per_second"] = 1000 * tokens_of(each["flags"]) / taken[each["flags"]]


def tokens_of(flags: str) -> int:
    """The tokens of a step."""
    words = shlex.split(flags)
    last = {word: words[index + 1] for index, word in enumerate(words[:-1])}
    return int(last["--length"]) * int(last["--batch-size"])


def steps_in(seconds: float, setting: dict[str, Any]) -> int:
    """How many steps of ``setting`` are made meanwhile at the speed that was measured."""
    return int(seconds * setting["tokens_per_second"] / tokens_of(setting["flags"]))


def keep(options: Any, result: dict[str, Any]) -> None:
    """Write what is known so far."""
    budget = {"steps": options.steps} if options.steps else {"minutes": options.minutes}
    facts = {"member": options.member, "data": Path(options.data).name, **budget, "seed": options.seed}
    facts |= {"clock": "processor" if options.processor else "wall", "settings": result}
    save(options, "minutes", facts)


if __name__ == "__main__":
    main()
