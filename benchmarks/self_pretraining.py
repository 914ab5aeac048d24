"""Does an encoder that first predicts masked symbols of its own training data classify it better, in equal steps?

Amos et al. 2023 (arXiv 2310.02980): models that are compared from random weights are compared by their beginnings; a
plain Transformer that is pretrained on the task's own data gains more than from another architecture. Here nested lists
of ListOps, a byte a symbol, so that both tasks have one vocabulary: the same encoder is trained on their values for
--steps, and, beside it, half of the steps on masked symbols of the same lists (values unseen) and half on their values.
What the outermost operator alone reveals (the most frequent value under it) stands beside both: that is the plateau of
listops.py. Run folders in --runs that exist already are only measured.

The pretrained one then goes on with longer lists, those of the Long Range Arena at the end, a few hundred steps each.

    python benchmarks/self_pretraining.py --runs runs/lists --threads 1
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from common import arguments, kinformer, prepare, save, show, train
from kinformer.lab.data.listops import examples

LETTERS = "0123456789nxms)"
"""A byte for each of ``kinformer.lab.data.listops.SYMBOLS``."""
SIZES = (
    "--recipe", "tiny", "--set", "layers=4", "--set", "dim=128", "--set", "layers.*.mixer.position=rope",
    "--set", "position=none", "--set", "input.bos_token=none", "--set", "input.eos_token=none",
)  # fmt: skip


LONGER = (((60, 400), 20_000, 400, 16), ((500, 2000), 4000, 300, 4))
"""How many symbols longer lists have, between; how many lists; steps and rows."""


def write(folder: Path, number: int, bounds: tuple[int, int], seed: int) -> dict[str, float]:
    """The lists as files, and what the outermost operator alone, and always the same value, make right of them."""
    trees, values = examples(number, seed, bounds)
    lines = ["".join(LETTERS[symbol] for symbol in tree) for tree in trees]
    folder.mkdir(parents=True, exist_ok=True)
    table = [f"{text}\t{value}" for text, value in zip(lines, values.tolist(), strict=True)]
    (folder / "lists.tsv").write_text("\n".join(["text\tlabel", *table, ""]), encoding="utf-8")
    (folder / "lists.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    roots = np.array([tree[0] for tree in trees])
    under = [Counter(values[roots == root].tolist()).most_common(1)[0][1] for root in set(roots.tolist())]
    guessed = Counter(values.tolist()).most_common(1)[0][1]
    return {"outermost_operator": sum(under) / len(values), "guessing": guessed / len(values)}


def classify(
    name: str, out: Path, data: Path, sizes: tuple[int, int, int], options: Any, *begun: Any
) -> dict[str, Any]:
    """A run of so many steps, rows and symbols a row on the values of lists: what it has right of held-out ones."""
    steps, rows, length = sizes
    task = ("--task", "classify", "--data", data / "lists.tsv", "--length", length, "--seed", options.seed)
    words = (*task, "--steps", steps, "--batch-size", rows, "--lr", options.lr, *begun)
    trained = train("bert", out, options.threads, *words, *options.further)
    measured = kinformer("evaluate", out, *(("--threads", options.threads) if options.threads else ()))
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
    longer = LONGER
    if options.quick:
        options.steps, options.examples, longer = 8, 200, (((60, 130), 200, 4, 4),)
    length = room(options.bounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        data, masked = folder / "lists", folder / "masked"
        plateau = write(data, options.examples, options.bounds, options.seed)
        whole, half = ((steps, options.rows, length) for steps in (options.steps, options.steps - options.steps // 2))
        runs = [classify("from scratch", folder / "scratch", data, whole, options, *SIZES) | plateau]
        first = ("--task", "mlm", "--data", data / "lists.txt", "--length", length, "--seed", options.seed)
        words = (*first, "--steps", options.steps // 2, "--batch-size", options.rows, "--lr", options.lr, *SIZES)
        pretrained = train("bert", masked, options.threads, *words, *options.further)
        before = folder / "pretrained"
        runs.append(classify("pretrained", before, data, half, options, "--init", masked) | plateau)
        runs[-1]["seconds"] += pretrained["seconds"]
        for bounds, number, steps, rows in longer:
            name = f"{bounds[0]} to {bounds[1]} symbols"
            data, out = folder / f"lists-{bounds[1]}", folder / f"longer-{bounds[1]}"
            plateau = write(data, number, bounds, options.seed)
            runs.append(classify(name, out, data, (steps, rows, room(bounds)), options, "--init", before) | plateau)
            before = out
    header = ("run", "accuracy", "bits per label", "seconds", "outermost operator", "guessing")
    keys = ("name", "accuracy", "bits_per_label", "seconds", "outermost_operator", "guessing")
    show("ListOps, held-out lists", header, [[run[key] for key in keys] for run in runs])
    settings = {key: getattr(options, key) for key in ("steps", "examples", "bounds", "rows", "lr", "seed")}
    settings |= {"sizes": list(SIZES), "longer": longer}
    save(options, "self_pretraining", {"settings": settings, "runs": runs})


def room(bounds: tuple[int, int]) -> int:
    """Positions for lists of fewer symbols than the upper bound."""
    return 16 * -(-bounds[1] // 16)


if __name__ == "__main__":
    main()
