"""Seconds until held-out text costs fewer bits per byte than a 5-gram model of the same text, 2.0 and 1.8.

`kinformer train gpt --minutes M` beside nanoGPT's published CPU settings (4 layers, 4 heads, dim 128, rows of 64 bytes,
12 a step, AdamW at 1e-3) and those of x-transformers' script for enwik8 (6 layers, 8 heads, dim 512, rotary positions,
16 rows of 1,024 bytes a step in four parts, Adam at 1e-4) in the same training engine, in turns, each as a user would
run it. The clock runs from the command on; a target is met at the first validation below it. Every run of this script
adds its figures to the history in the result file, which others can try to beat; --note says what was changed.

    python benchmarks/speedrun.py --data book.txt --minutes 1 4 --runs 3 --note "as released"
"""

from __future__ import annotations

import json
import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, arguments, kinformer, prepare, save, show

NANOGPT = (
    "--set dim=128 --set layers.*.feed_forward.hidden_dim=512 --recipe small --tokenizer bytes --length 64 "
    "--batch-size 12 --optimizer adamw --lr 1e-3 --set training.min_lr_ratio=0.1 --weight-decay 0.1 "
    "--set training.beta2=0.99 --precision fp32"
)
X_TRANSFORMERS = (
    "--set layers=6 --set dim=512 --set layers.*.mixer.num_heads=8 --set layers.*.feed_forward.hidden_dim=2048 "
    "--set position=none --set layers.*.mixer.position=rope --recipe small --tokenizer bytes --length 1024 "
    "--batch-size 16 --accumulate 4 --optimizer adamw --lr 1e-4 --set training.min_lr_ratio=1 --warmup 0 "
    "--weight-decay 0 --clip 0.5 --precision fp32"
)
CONTESTANTS = {"kinformer": "", "nanoGPT's CPU recipe": NANOGPT, "x-transformers' enwik8 script": X_TRANSFORMERS}
TARGETS = (2.0, 1.8)


def run(options: Any, flags: str, minutes: float, seed: int) -> dict[str, Any]:
    """One training as a user runs it; its wall time, its curve and its held-out figure."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        words = ["train", "gpt", "--data", options.data, "--holdout", 0.1, "--out", out, "--minutes", minutes]
        begun = time.monotonic()
        kinformer(*words, "--quiet", "--seed", seed, "--validation-tokens", 16384, *shlex.split(flags))
        wall = time.monotonic() - begun
        found = kinformer("evaluate", out, "--quiet", "--baseline")
        curve, seconds = [], 0.0
        for line in (out / "metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            seconds = entry.get("seconds", seconds)
            if "validation_bits_per_byte" in entry:
                curve.append((seconds, entry["validation_bits_per_byte"]))
    return {
        "minutes": minutes,
        "seed": seed,
        "wall": wall,
        "bits_per_byte": found["bits_per_byte"],
        "ngram": found["ngram_bits_per_byte"],
        "curve": curve,
    }


def reached(each: dict[str, Any], target: float) -> float | None:
    """Seconds until the curve was below ``target``; None if it never was."""
    return next((seconds for seconds, bits in each["curve"] if bits < target), None)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", required=True, help="the text")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 4.0], help="the budgets")
    parser.add_argument("--runs", type=int, default=3, help="seeds of each")
    parser.add_argument("--only", nargs="*", help="only the contestants of these names")
    parser.add_argument("--note", default="", help="what is new in this entry of the history")
    options = prepare(parser)
    path = options.out or RESULTS / "speedrun.json"
    before = json.loads(path.read_text())["history"] if path.exists() else []
    entries: list[dict[str, Any]] = []
    told = {"date": time.strftime("%Y-%m-%d"), "note": options.note, "data": Path(options.data).name, "runs": entries}
    for seed in range(1 if options.quick else options.runs):
        for minutes in [0.1] if options.quick else options.minutes:
            for name, flags in CONTESTANTS.items():
                if options.only and name not in options.only:
                    continue
                entries.append({"name": name} | run(options, flags, minutes, seed))
                print(f"{name}, {minutes:g} minutes, seed {seed}: {entries[-1]['bits_per_byte']:.3f}", flush=True)
                save(options, "speedrun", {"history": [*before, told]})  # so that a run cut short leaves what it has
    rows = []
    for name, minutes in dict.fromkeys((each["name"], each["minutes"]) for each in entries):
        own = [each for each in entries if (each["name"], each["minutes"]) == (name, minutes)]
        bits = [each["bits_per_byte"] for each in own]
        times = [
            [found for each in own if (found := reached(each, target)) is not None]
            for target in (own[0]["ngram"], *TARGETS)
        ]
        medians = [statistics.median(found) if len(found) == len(own) else None for found in times]
        walls = statistics.median(each["wall"] for each in own)
        rows.append([name, minutes, walls, statistics.median(bits), max(bits) - min(bits), *medians])
    baseline = entries[0]["ngram"]
    header = ["", "minutes", "wall s", "bits per byte", "spread", f"s to {baseline:.3f}", "s to 2.0", "s to 1.8"]
    show(f"{Path(options.data).name}: the 5-gram has {baseline:.3f}", header, rows)


if __name__ == "__main__":
    main()
