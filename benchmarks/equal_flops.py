"""Images seen whole: which encoder makes the most of the same computation?

ViT reads an image as 64 patches of 4 x 4 pixels, all of which see each other; Swin as 256 of 2 x 2, which see each
other within windows that shift, and in its second half as 64 patches of twice the width. Their sizes are such that a
step costs about as many FLOPs; what remains is made up by steps (--steps are ViT's). Everything else is the same:
images, their augmentation, AdamW, the learning rate's schedule; the rates are swept with the first seed, and further
seeds run at the best. Run folders in --runs that are finished are only measured, and those that were stopped go on.
Extra options of `kinformer train` for all contestants stand after --:

    python benchmarks/equal_flops.py --data pictures/ --steps 2000 --runs runs/equal -- --augment crop,flip
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, sets, show, train

STAGES = {
    "input.patch": 2,
    "dim": 64,
    **{f"layers.{index}.mixer.num_heads": 2 + 2 * (index > 1) for index in range(4)},
    **{f"layers.{index}.feed_forward.hidden_dim": 256 + 256 * (index > 1) for index in range(4)},
}
PLAIN = {"dim": 128, "layers.*.mixer.num_heads": 4, "layers.*.feed_forward.hidden_dim": 512}
CONTESTANTS: dict[str, dict[str, Any]] = {"vit": PLAIN, "swin": STAGES}
RATES = (3e-4, 1e-3, 3e-3)
MEASURED = ("accuracy", "bits_per_label", "calibration_error", "guessing", "measured_images", "data")


def contestant(
    member: str, rate: float, seed: int, flops: dict[str, int], folder: Path, options: Any
) -> dict[str, Any]:
    """Train, or go on training, and measure one run of as many FLOPs as ViT's --steps."""
    out = folder / f"{member}-{rate:g}-{seed}"
    steps = round(options.steps * flops["vit"] / flops[member])
    threads = ("--threads", options.threads) if options.threads else ()
    words = ("--data", options.data) if options.data else ()
    settings = ("--steps", steps, "--seed", seed, "--lr", rate, *options.further)
    trained = train(member, out, options.threads, "--task", "vision", *words, *settings, *sets(CONTESTANTS[member]))
    measured = kinformer("evaluate", out, *threads)
    found = {"member": member, "rate": rate, "seed": seed, "steps": steps, "seconds": trained["seconds"]}
    found |= {"parameters": trained["parameters"]} | {each: measured[each] for each in MEASURED}
    print(f"{member}, {rate:g}, seed {seed}: {found['accuracy']:.1%} right", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", help="images; the digits that come with the package if not given")
    parser.add_argument("--steps", type=int, default=1000, help="of ViT")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    rates = RATES
    if options.quick:
        options.steps, options.seeds, rates = 3, 1, RATES[:1]
    told = {name: kinformer("estimate", name, *sets(changes)) for name, changes in CONTESTANTS.items()}
    flops = {name: found["flops_step"] for name, found in told.items()}
    runs, best = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        place = options.runs or Path(scratch)
        for member in CONTESTANTS:
            swept = [contestant(member, rate, 0, flops, place, options) for rate in rates]
            best[member] = max(swept, key=lambda run: run["accuracy"])["rate"]
            later = [contestant(member, best[member], seed, flops, place, options) for seed in range(1, options.seeds)]
            runs += swept + later
    table = []
    for member, rate in best.items():
        own = [run["accuracy"] for run in runs if (run["member"], run["rate"]) == (member, rate)]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        table.append([member, rate, flops[member] / 1e6, statistics.mean(own), spread, min(own), max(own)])
    heads = ("member", "learning rate", "MFLOPs a step and image", "mean", "deviation", "least", "most")
    show("accuracy on the test split", heads, table)
    settings = {"steps": options.steps, "flops_of_a_step_and_image": flops, "further": options.further}
    save(options, "equal_flops", settings | {"runs": runs})


if __name__ == "__main__":
    main()
