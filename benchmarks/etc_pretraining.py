"""Does ETC's global input learn to stand for its sentences, and does the long input need it?

Trains the member etc on masked bytes and contrastive prediction (`kinformer train etc --objective mlm-cpc`), then
measures on the test split (`kinformer evaluate`)

    sentences  how many of those masked as a whole are identified among the batch's others by their global tokens
    bytes      bits per masked byte with the global input, with its vectors zeroed, and without it

Two layers of dim 64 with windows of 16 to the left and right, 128 bytes in sentences of 16: of each of the 64 rows of a
batch one sentence is masked, so that chance is 1 in 64. The budget is --steps or --minutes. Extra options of
`kinformer train` stand after --.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import arguments, kinformer, prepare, save, sets, show

GOAL = 5.0
"""Times chance."""
RECIPE = {
    "dim": 64,
    "layers.*.mixer.num_heads": 4,
    "layers.*.mixer.max_distance": 12,
    "layers.*.mixer.pattern.window": 16,
    "layers.*.feed_forward.hidden_dim": 256,
    "global_input.length": 16,
}
LENGTH, ROWS, RATE = 128, 64, 3e-3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, help="the budget, instead of --steps")
    parser.add_argument("--run", type=Path, help="keep the run folder here; one that is there already is only measured")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.steps, options.minutes = 4, None
    threads = ("--threads", options.threads) if options.threads else ()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.run or Path(scratch) / "run"
        if not (folder / "config.json").exists():
            shape = ("--length", LENGTH, "--batch-size", ROWS, "--lr", RATE)
            budget = ("--minutes", options.minutes) if options.minutes else ("--steps", options.steps)
            kinformer(
                "train", "etc", "--recipe", "tiny", "--task", "mlm", "--objective", "mlm-cpc", "--data", options.data,
                "--out", folder, *shape, *budget, *sets(RECIPE), *threads, *options.further,
            )  # fmt: skip
        limit = ("--max-bytes", 65536) if options.quick else ()
        measured = kinformer("evaluate", folder, *limit, *threads)
        training = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
    measured.pop("run")
    found = measured["global_input"]
    ratio = found["accuracy"] / found["chance"]
    show(
        f"{found['sentences']} masked sentences identified by their global tokens",
        ("", "share"),
        [["accuracy", found["accuracy"]], ["by chance", found["chance"]], [f"times chance (goal: {GOAL:g})", ratio]],
    )
    show(
        "bits per masked byte",
        ("global input", "bits"),
        [["as it is", found["bits"]], ["vectors zeroed", found["zeroed"]], ["none", found["without"]]],
    )
    save(options, "etc_pretraining", {"training": training, "times_chance": ratio, "goal": GOAL} | measured)


if __name__ == "__main__":
    main()
