"""Does an encoder that first predicts masked symbols of its own training data classify it better, in equal steps?

Amos et al. 2023 (arXiv 2310.02980): models that are compared from random weights are compared by their beginnings; a
plain Transformer that is pretrained on the task's own data gains more than from another architecture. Here nested lists
of ListOps, a byte a symbol, so that both tasks have one vocabulary: the same encoder is trained on their values for
--steps, and, beside it, half of the steps on masked symbols of the same lists (values unseen) and half on their values.
What the outermost operator alone reveals (each value's share under it, from the training lists) stands beside both:
that is the plateau of listops.py. Run folders in --runs that exist already are only measured.

    python benchmarks/self_pretraining.py --runs runs/lists --threads 1
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from common import arguments, kinformer, prepare, save, show, train
from kinformer.data.listops import examples

LETTERS = "0123456789nxms)"
"""A byte for each of ``kinformer.data.listops.SYMBOLS``."""
HELD_OUT = 2000
SIZES = (
    "--recipe", "tiny", "--set", "layers=4", "--set", "dim=128", "--set", "layers.*.mixer.position=rope",
    "--set", "position=none", "--set", "input.bos_token=none", "--set", "input.eos_token=none",
)  # fmt: skip


def write(folder: Path, options: Any) -> dict[str, float]:
    """The lists as files, and what the outermost operator alone makes right."""
    trees, values = examples(options.examples + HELD_OUT, options.seed, options.bounds)
    lines = ["".join(LETTERS[symbol] for symbol in tree) for tree in trees]
    parts = {"test": slice(HELD_OUT), "train": slice(HELD_OUT, None)}
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        table = [f"{text}\t{value}" for text, value in zip(lines[rows], values[rows].tolist(), strict=True)]
        (folder / f"{part}.tsv").write_text("\n".join(["text\tlabel", *table, ""]), encoding="utf-8")
    (folder / "train.txt").write_text("\n".join([*lines[parts["train"]], ""]), encoding="utf-8")
    roots = np.array([tree[0] for tree in trees])
    votes = {root: Counter(values[parts["train"]][roots[parts["train"]] == root].tolist()) for root in set(roots)}
    right = [votes[root].most_common(1)[0][0] == value for root, value in zip(roots, values, strict=True)]
    guessed = Counter(values[parts["train"]].tolist()).most_common(1)[0][0]
    return {
        "outermost_operator": float(np.mean(right[:HELD_OUT])),
        "guessing": float(np.mean(values[:HELD_OUT] == guessed)),
    }


def classify(name: str, out: Path, steps: int, data: Path, options: Any, *begun: Any) -> dict[str, Any]:
    """A run on the values: what it has right of the test lists, and of its validation while it was trained."""
    task = ("--task", "classify", "--data", data / "train.tsv", "--length", options.length, "--seed", options.seed)
    words = (*task, "--steps", steps, "--batch-size", options.rows, "--lr", options.lr, *begun)
    trained = train("bert", out, options.threads, *words, *options.further)
    threads = ("--threads", options.threads) if options.threads else ()
    measured = kinformer("evaluate", out, "--data", data / "test.tsv", *threads)
    run = {"name": name, "steps": steps, "seconds": trained["seconds"], "parameters": trained["parameters"]}
    run |= {key: measured[key] for key in ("accuracy", "bits_per_label", "examples")}
    print(f"{name}: {run['accuracy']:.1%} right after {steps} steps", flush=True)
    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=6000, help="of each contestant, both stages together")
    parser.add_argument("--examples", type=int, default=96_000, help="lists to train on")
    parser.add_argument("--bounds", type=int, nargs=2, default=(10, 60), help="how many symbols a list has, between")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="keep the data and the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.steps, options.examples = 8, 200
    options.length = 16 * -(-options.bounds[1] // 16)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        data = folder / "lists"
        plateau = write(data, options)
        runs = [classify("from scratch", folder / "scratch", options.steps, data, options, *SIZES)]
        masked = folder / "masked"
        first = ("--task", "mlm", "--data", data / "train.txt", "--length", options.length, "--seed", options.seed)
        words = (*first, "--steps", options.steps // 2, "--batch-size", options.rows, "--lr", options.lr, *SIZES)
        pretrained = train("bert", masked, options.threads, *words, *options.further)
        rest = options.steps - options.steps // 2
        runs.append(classify("pretrained", folder / "pretrained", rest, data, options, "--init", masked))
        runs[-1]["seconds"] += pretrained["seconds"]
    table = [[run["name"], run["accuracy"], run["bits_per_label"], run["seconds"]] for run in runs]
    table += [[name.replace("_", " "), value, None, None] for name, value in plateau.items()]
    show("ListOps, test lists", ("run", "accuracy", "bits per label", "seconds"), table)
    settings = {key: getattr(options, key) for key in ("steps", "examples", "bounds", "length", "rows", "lr", "seed")}
    save(options, "self_pretraining", {"settings": settings | {"sizes": list(SIZES)}, **plateau, "runs": runs})


if __name__ == "__main__":
    main()
