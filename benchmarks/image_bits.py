"""Bits per dimension of drawn images after so many minutes, and what the models make of occluded ones.

    python benchmarks/image_bits.py --data mnist --minutes 60            # four times the minutes, and measuring
    python benchmarks/image_bits.py --data mnist --runs runs/digits      # measures runs that are there already

Every member is trained for the same minutes by one recipe at width 128, measured on the test images, every value
scored, beside the histogram of every place and the context of four neighbours, and completes the first test images from
their upper rows, three times; the picture has what is kept of each image, the completions, and the image itself. A run
that is stopped goes on when the script is called again with the same --work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import RESULTS, arguments, kinformer, prepare, save, sets, show
from kinformer.lab.runs.run import open_run

SMALL = {"dim": 128, "layers.*.feed_forward.hidden_dim": 512}
LSH = {"stack.recompute": "false"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear-transformer": ("linear-transformer", {}),
    "gpt": ("gpt", {}),
    "lsh-1": ("reformer", LSH | {"layers.*.mixer.rounds": 1}),
    "lsh-4": ("reformer", LSH | {"layers.*.mixer.rounds": 4}),
}
"""The four of Katharopoulos et al. 2020, table 1; reversible layers keep their activations, as its LSH models do."""


def trained(name: str, folder: Path, options: Any) -> Path:
    """The run of the model ``name``, begun or gone on with."""
    member, changes = MODELS.get(name, (name, {}))
    words = ["train", member, "--out", folder, "--minutes", options.minutes]
    if options.threads:
        words += ["--threads", options.threads]
    if (folder / "config.json").is_file():
        kinformer(*words, "--resume")
    else:
        more = ("--task", "image", "--data", options.data, "--batch-size", 8, "--optimizer", "muon", "--lr", 1e-2)
        kinformer(*words, *more, *sets(SMALL | changes), *(("--recipe", "tiny") if options.quick else ()))
    return folder


def measured(folder: Path, options: Any) -> dict[str, Any]:
    """Figures of a run, and its picture of completions beside the results."""
    run = open_run(folder)
    limits = ("--max-items", options.images) if options.images else ()
    threads = ("--threads", options.threads) if options.threads else ()
    found = kinformer("evaluate", folder, *limits, *threads)
    beside = options.out or (folder if options.quick else RESULTS) / "image_bits.json"
    picture = beside.with_name(f"{beside.stem}_{folder.name}.png")
    completing = ("--complete", options.data, "--rows", options.rows, "--samples", 3, "--seed", 0)
    drawn = kinformer("generate", folder, *completing, "--out", picture, *threads)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = max((json.loads(line).get("step", 0) for line in lines), default=0)
    return {
        "name": folder.name,
        "member": run.member,
        "recipe": run.recipe,
        "dim": run.config.dim,
        "layers": len(run.config.layers),
        "minutes": run.training["minutes"],
        "steps": steps,
        "images_learned_from": steps * run.training["batch_size"],
        "picture": picture.name,
        "completions": drawn["images"],
        **{name: found[name] for name in ("bits_per_dim", "histogram_bits", "neighbours_bits", "images", "data")},
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="digits", help="images, as kinformer train takes them")
    parser.add_argument("--members", nargs="+", default=list(MODELS), help="of the four, or members")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--work", type=Path, default=Path("runs/image_bits"), help="where the runs are")
    parser.add_argument("--runs", type=Path, nargs="+", help="measure these runs instead of training")
    parser.add_argument("--images", type=int, help="measure on the first N test images only")
    parser.add_argument("--rows", type=int, default=12, help="how many rows of an occluded image are kept")
    options = prepare(parser)
    if options.quick:
        options.minutes, options.images, options.rows = 0.05, 8, 4
    folders = options.runs or [trained(member, options.work / member, options) for member in options.members]
    found = [measured(folder, options) for folder in folders]
    rows = [[each["name"], each["minutes"], each["steps"], each["bits_per_dim"]] for each in found]
    floors = [[name, None, None, found[0][f"{name}_bits"]] for name in ("neighbours", "histogram")]
    show("bits per dimension", ("", "minutes", "steps", "bits"), rows + floors)
    save(options, "image_bits", {"runs": found})


if __name__ == "__main__":
    main()
