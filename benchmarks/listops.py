"""What nested lists of 500 to 2,000 tokens compute: how often is each encoder right after the same time, by one recipe?

Every member is trained from scratch for --minutes. Then --long once more in the same time in all, the way its authors
train it: first --short on lists of at most 500 tokens for the share --share of the minutes, then --long from its
weights on the long ones. Beside the accuracy stands that of always telling the most frequent value. Figures compare
only inside one recipe. Run folders in --runs that exist already are only measured. Extra options of `kinformer train`
stand after --:

    python benchmarks/listops.py --members bert longformer big-bird --minutes 20 -- --lr 3e-4 --batch-size 16
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show, train

MEMBERS = ("bert", "longformer")
LENGTH, SHORT_LENGTH, SHORT_LISTS, EXAMPLES = 2048, 512, "20-500", 96_000
TRAINED = ("steps", "parameters", "seconds", "tokens_per_second", "best_step")
MEASURED = ("accuracy", "guessing", "bits_per_label", "examples", "classes", "length", "data")


def lists(member: str, folder: Path, minutes: float, options: Any, *more: Any) -> dict[str, Any]:
    """Train a member on ListOps; what the command tells."""
    budget = ("--steps", options.steps) if options.steps else ("--minutes", minutes)
    task = ("--task", "listops", "--examples", options.examples, "--seed", options.seed, *budget)
    return train(member, folder, options.threads, *task, *more, *options.further)


def measure(name: str, member: str, folder: Path, trained: dict[str, Any], options: Any) -> dict[str, Any]:
    """Evaluate a run on the test split."""
    measured = kinformer("evaluate", folder, *(("--threads", options.threads) if options.threads else ()))
    run = {"name": name, "member": member} | {each: trained[each] for each in TRAINED}
    run |= {each: measured[each] for each in MEASURED}
    run["training"] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
    print(
        f"{name}: {run['accuracy']:.1%} right after {run['steps']} steps (guessing {run['guessing']:.1%})", flush=True
    )
    return run


def from_scratch(member: str, folder: Path, options: Any) -> dict[str, Any]:
    """All minutes on long lists."""
    trained = lists(member, folder, options.minutes, options, "--length", options.length, *positions(member, options))
    return measure(member, member, folder, trained, options)


def staged(folder: Path, options: Any) -> dict[str, Any]:
    """A share of the minutes on short lists with the short member, the rest on long ones with the long member."""
    short = folder / f"{options.short}-short"
    first = options.share * options.minutes
    brief = ("--length", options.short_length, "--example-tokens", options.short_lists)
    lists(options.short, short, first, options, *brief)
    out = folder / f"{options.long}-from-{options.short}"
    trained = lists(options.long, out, options.minutes - first, options, "--length", options.length, "--init", short)
    return measure(f"{options.long} from {options.short}", options.long, out, trained, options)


def positions(member: str, options: Any) -> tuple[str, ...]:
    """Room for long lists where a recipe's learned positions end before."""
    return ("--set", f"position.max_length={options.length}") if member in options.stretch else ()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--members", nargs="*", default=list(MEMBERS), help="trained from scratch")
    parser.add_argument(
        "--stretch", nargs="*", default=["bert", "blockbert"], help="of which positions are to be longer"
    )
    parser.add_argument("--short", default="bert")
    parser.add_argument("--long", default="longformer", help="begins with the weights of --short")
    parser.add_argument("--share", type=float, default=0.5, help="of the minutes that --short is trained")
    parser.add_argument("--minutes", type=float, default=20.0, help="of each contestant, both stages together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    options.steps, options.examples, options.length, options.short_length = None, EXAMPLES, LENGTH, SHORT_LENGTH
    options.short_lists = SHORT_LISTS
    if options.quick:
        options.steps, options.examples, options.length, options.short_length = 4, 64, 120, 120
        options.short_lists = "20-100"
        options.further = ["--recipe", "tiny", *options.further]
        options.stretch = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        runs = [from_scratch(member, folder / member, options) for member in options.members]
        runs.append(staged(folder, options))
    header = ("member", "accuracy", "bits per label", "steps", "tokens/s")
    table = [[r["name"], r["accuracy"], r["bits_per_label"], r["steps"], r["tokens_per_second"]] for r in runs]
    show("ListOps, test split", header, [*table, ["guessing", runs[0]["guessing"], None, None, None]])
    save(options, "listops", {"runs": runs})


if __name__ == "__main__":
    main()
