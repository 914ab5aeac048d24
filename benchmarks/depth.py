"""Quality against depth (Elbayad et al. 2020, figures 2 and 3): bits per byte by the mean number of layers of a token.

Trains depth-adaptive Transformers of six layers on the bytes of a text, with one head for all exits (tied) and with one
for each (separate), by one recipe for equally many steps: aligned training, and the geometric-like rule of the
likelihood oracle. Measures each with all tokens leaving by one exit, for every exit, and by the learnt rule, at several
thresholds. Run folders in --runs that exist already are gone on with, or only measured:

    python benchmarks/depth.py --data war-and-peace.txt --runs runs/depth
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, arguments, kinformer, prepare, save, sets, show, train
from kinformer.lab.drawing.plots import FAINT, QUIET, SERIES, bare, figure
from kinformer.lab.drawing.plots import save as save_figure

LAYERS = 6
SIZES = {"layers": LAYERS, "dim": 128, "layers.*.mixer.num_heads": 4, "layers.*.feed_forward.hidden_dim": 512}
RULE = {"stack.rule.penalty": 0.02}
TRAINING = ("--tokenizer", "bytes", "--optimizer", "muon", "--lr", 5e-3, "--batch-size", 8, "--length", 128)
CLASSIFIERS = {"tied": "true", "separate": "false"}
"""And whether the heads also share the table of the tokens."""
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NEVER = 2.0
"""A threshold that no probability reaches."""


def trained(classifiers: str, options: Any) -> Path:
    """The run with these heads, begun, gone on with or already there."""
    folder = options.runs / classifiers
    changes = SIZES | RULE | {"stack.classifiers": classifiers, "head.tied": CLASSIFIERS[classifiers]}
    words = ("--recipe", "small", *sets(changes), *TRAINING, "--data", options.data, "--steps", options.steps)
    train("depth-adaptive", folder, torch.get_num_threads(), *words)
    return folder


def measured(folder: Path, thresholds: list[float], options: Any) -> dict[str, float]:
    """Layers per token and bits per byte of a run whose tokens leave by these thresholds of its exits."""
    limits = ("--max-bytes", options.bytes, "--threads", torch.get_num_threads())
    told = kinformer("evaluate", folder, "--set", f"stack.rule.thresholds={thresholds}", *limits)
    return {name: told[name] for name in ("layers_per_token", "bits_per_byte")}


def draw(runs: dict[str, Any], path: Path) -> None:
    """Bits per byte by layers per token: of single exits, and of the rule."""
    with figure(5.2, 3.4) as drawn:
        axes = drawn.add_subplot()
        for colour, (name, run) in zip(SERIES, runs.items(), strict=False):
            for key, marker, style in (("exits", "o", ":"), ("rule", ".", "-")):
                points = [(each["layers_per_token"], each["bits_per_byte"]) for each in run[key]]
                label = f"{name}, {'one exit for all' if key == 'exits' else 'learnt rule'}"
                axes.plot(*zip(*sorted(points), strict=True), marker=marker, linestyle=style, color=colour, label=label)
        axes.set_xlabel("layers per token")
        axes.set_ylabel("held-out bits per byte")
        axes.grid(color=FAINT)
        axes.legend(frameon=False, labelcolor=QUIET)
        bare(axes, "left", "bottom")
        drawn.tight_layout()
        save_figure(drawn, path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="the text (Python's own sources if not given)")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--steps", type=int, default=2500, help="of training")
    parser.add_argument("--bytes", default="100k", help="of the test split that are measured")
    options = prepare(parser)
    thresholds = THRESHOLDS
    if options.quick:
        options.steps, options.bytes, thresholds = 3, "2k", THRESHOLDS[:2]
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        options.runs = options.runs or Path(scratch)
        for classifiers in CLASSIFIERS:
            folder = trained(classifiers, options)
            one = [[0.0 if exit == last else NEVER for exit in range(LAYERS - 1)] for last in range(LAYERS)]
            exits = [measured(folder, each, options) for each in one]
            rule = [{"threshold": each} | measured(folder, [each], options) for each in thresholds]
            runs[classifiers] = {"exits": exits, "rule": rule}
    for classifiers, found in runs.items():
        rows = [
            [f"exit {n + 1}", each["layers_per_token"], each["bits_per_byte"]] for n, each in enumerate(found["exits"])
        ]
        rows += [[f"rule, {e['threshold']}", e["layers_per_token"], e["bits_per_byte"]] for e in found["rule"]]
        show(f"{classifiers} heads", ("", "layers per token", "bits per byte"), rows)
    settings = {"sizes": SIZES | RULE, "training": list(TRAINING), "steps": options.steps, "bytes": options.bytes}
    save(options, "depth", {"settings": settings, "data": Path(options.data).name, "runs": runs})
    if not options.quick:
        draw(runs, (options.out or RESULTS / "depth.json").with_suffix(".png"))


if __name__ == "__main__":
    main()
