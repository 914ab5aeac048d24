"""The peak memory of training processes beside what ``kinformer estimate`` tells of it: every member, two sizes.

A process makes three steps and a validation of a member's recipe ``small`` on one thread; what is measured is the
largest resident set that the system ever saw of it. The estimate is of the same config and sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show
from kinformer.family.table import MEMBERS

SIZES = ((256, 4), (512, 8))
"""Length and rows."""


def measured(member: str, length: int, batch: int) -> int:
    """Bytes of the largest resident set of a training process; the system counts it."""
    steps = ["--steps", "3", "--validate-every", "3"]
    sizes = ["--length", str(length), "--batch-size", str(batch), *steps, "--threads", "1"]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "kinformer", "train", member, *sizes, "--out", f"{folder}/run", "--quiet"]
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"kinformer train {member} failed; run it by hand to see why.")
    return usage.ru_maxrss * 1024


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", help="only these members")
    parser.add_argument("--measured", type=Path, help="a result file, whose processes are not measured again")
    options = prepare(parser)
    earlier = json.loads(options.measured.read_text())["members"] if options.measured else {}
    rows: list[list[Any]] = []
    result = {}
    for member in options.only or list(MEMBERS):
        for length, batch in SIZES[: 1 if options.quick else None]:
            told = kinformer("estimate", member, "--length", length, "--batch", batch)
            name = f"{member} {length} x {batch}"
            peak = earlier[name]["measured"] if name in earlier else measured(member, length, batch)
            ratio = told["peak_bytes"] / peak
            result[name] = {"measured": peak, "ratio": ratio} | told["peak"]
            rows.append([member, length, batch, peak / 2**20, told["peak_bytes"] / 2**20, ratio])
            print(*rows[-1], flush=True)
    ratios: list[Any] = sorted(row[-1] for row in rows)
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios) / len(ratios)
    facts = {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1], "within_a_tenth": within}
    show("peak of a training process, MiB", ["member", "length", "rows", "measured", "estimated", "ratio"], rows)
    print(facts)
    save(options, "estimate_peak", {"summary": facts, "members": result})


if __name__ == "__main__":
    main()
