"""Few labels: what does a ViT gain from a teacher? ViT and DeiT, by hard and by soft distillation, on some labels.

For each seed a convolutional teacher (``convformer``) learns from --label-share of the training images, drawn by the
seed and the same for all four; then the students learn from the same images, with the teacher's word or without. All
have one recipe, one number of steps and one augmentation; the test split is whole. Run folders in --runs that are
finished are only measured, and those that were stopped go on, so that the script may be begun again. Extra options of
`kinformer train` for all contestants stand after --:

    python benchmarks/distillation.py --data pictures/ --steps 3000 --seeds 3 --runs runs/distillation -- --recipe small
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show, train

TEACHER = "convformer"
STUDENTS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "vit": ("vit", None),
    "deit, hard": ("deit", ("--distillation", "hard")),
    "deit, soft": ("deit", ("--distillation", "soft")),
}
MEASURED = ("accuracy", "bits_per_label", "calibration_error", "guessing", "measured_images", "data")
TRAINED = ("steps", "parameters", "seconds", "best_step", "validation_accuracy")


def contestant(name: str, member: str, seed: int, folder: Path, options: Any, *more: Any) -> dict[str, Any]:
    """Train, or go on training, and measure one run."""
    out = folder / f"{name.replace(', ', '-')}-{seed}"
    threads = ("--threads", options.threads) if options.threads else ()
    data = ("--data", options.data) if options.data else ()
    settings = ("--steps", options.steps, "--seed", seed, "--label-share", options.label_share, *options.further)
    trained = train(member, out, options.threads, "--task", "vision", *data, *settings, *more)
    measured = kinformer("evaluate", out, *threads)
    found = {"name": name, "member": member, "seed": seed}
    found |= {each: trained[each] for each in TRAINED} | {each: measured[each] for each in MEASURED}
    print(f"{name}, seed {seed}: {found['accuracy']:.1%} right", flush=True)
    return found


def of_seed(seed: int, folder: Path, options: Any) -> list[dict[str, Any]]:
    """Teacher and students."""
    runs = [contestant(TEACHER, TEACHER, seed, folder, options)]
    for name, (member, distillation) in STUDENTS.items():
        taught = () if distillation is None else ("--teacher", folder / f"{TEACHER}-{seed}", *distillation)
        runs.append(contestant(name, member, seed, folder, options, *taught))
    return runs


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", help="images; the digits that come with the package if not given")
    parser.add_argument("--label-share", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    if options.quick:
        options.steps, options.seeds, options.further = 3, 1, ["--recipe", "tiny", "--batch-size", "8"]
    with tempfile.TemporaryDirectory() as scratch:
        runs = [each for seed in range(options.seeds) for each in of_seed(seed, options.runs or Path(scratch), options)]
    table = []
    for name in (TEACHER, *STUDENTS):
        own = [run["accuracy"] for run in runs if run["name"] == name]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        table.append([name, statistics.mean(own), spread, min(own), max(own)])
    show("accuracy on the test split", ("contestant", "mean", "deviation", "least", "most"), table)
    settings = {"label_share": options.label_share, "steps": options.steps, "further": options.further}
    save(options, "distillation", settings | {"runs": runs})


if __name__ == "__main__":
    main()
