"""The peak memory of training processes beside what ``kinformer estimate`` tells of it: every member, two sizes.

A process makes three steps and a validation of a member's recipe ``small`` on one thread; what is measured is the
largest resident set that the system ever saw of it. The estimate is of the config that was trained, and of its sizes.
Members of text read the embedded text, or are given made pairs of lines and made sound whose rows are all as long as
said; images are the embedded digits, in more rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any

from common import arguments, prepare, save
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.family.table import member as record_of
from kinformer.lab.estimation.estimate import estimate, interpreter_bytes, peak
from kinformer.lab.estimation.parts import without_data
from kinformer.lab.runs.describe import objective_cost
from kinformer.lab.runs.run import open_run

SIZES = ((256, 4), (512, 8))
"""Length and rows."""
IMAGES = (64, 256)
"""Rows of images."""
HOP = 0.01
"""Seconds of sound for a frame."""


def measured(member: str, length: int, batch: int) -> tuple[int, Any, int]:
    """Bytes of the largest resident set of a training process, as the system counts it; its config and length."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "kinformer", "train", member, "--out", f"{folder}/run", "--quiet"]
        words += ["--steps", "3", "--validate-every", "3", "--threads", "1", "--batch-size", str(batch)]
        words += rows(member, length, folder)
        with (folder / "said.txt").open("w+") as said:
            process = subprocess.Popen(words, stderr=said)
            _, status, usage = os.wait4(process.pid, 0)
            said.seek(0)
            if status:
                raise SystemExit(f"kinformer train {member} ended with {status}: {said.read()}")
        config = open_run(folder / "run").config
    return usage.ru_maxrss * 1024, config, config.input.length or length


def rows(member: str, length: int, folder: Path) -> list[str]:
    """Options that give ``member`` rows of ``length`` positions, with what they need in ``folder``."""
    config = configure(member, "small")
    if getattr(config.input, "whole", False):
        return []
    if config.input.kind == "frames":
        for index in range(96):
            with wave.open(f"{folder}/{index % 10}_{'ab'[index % 2]}_{index}.wav", "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(8000)
                file.writeframes(os.urandom(2 * int(8000 * HOP * length * config.input.stride)))
        return ["--data", str(folder)]
    if hasattr(config, "encoder"):
        lines = "".join(f"{'a' * (length - 3)}\t{'b' * (length - 2)}\n" for _ in range(64))
        (folder / "pairs.tsv").write_text(lines)
        return ["--data", f"{folder}/pairs.tsv", "--length", str(length)]
    return ["--length", str(length)]


def told(member: str, config: Any, length: int, batch: int) -> dict[str, int]:
    """What ``kinformer estimate`` tells of the peak, by what holds it."""
    sizes = {"length": length, "batch": batch}
    own = objective_cost(config, record_of(member).objective, **sizes, optimizer="adamw")
    return peak(config, estimate(config, **sizes), **sizes, objective=own, interpreter=interpreter_bytes())


def sizes_of(member: str, quick: bool) -> list[tuple[int, int]]:
    """Lengths and rows that are measured; of images the length is the model's own (0)."""
    config = configure(member, "small")
    if getattr(config.input, "whole", False):
        return [(0, many) for many in IMAGES]
    most = getattr(without_data(config), "max_length", None) or SIZES[-1][0]
    return [(min(length, most), many) for length, many in SIZES[: 1 if quick else None]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", help="only these members")
    parser.add_argument("--measured", type=Path, help="a result file, whose processes are not measured again")
    options = prepare(parser)
    result = json.loads(options.measured.read_text())["members"] if options.measured else {}
    for member in options.only or list(MEMBERS):
        for length, batch in sizes_of(member, options.quick):
            name = f"{member} {length} x {batch}" if length else f"{member} {batch} images"
            if name in result:
                continue
            most, config, length = measured(member, length, batch)
            parts = told(member, config, length, batch)
            ratio = sum(parts.values()) / most
            result[name] = {"measured": most, "ratio": ratio} | parts
            print(f"{name}: {most / 2**20:.0f} MiB, estimated {ratio:.2f} of it", flush=True)
        report(options, result)


def report(options: Any, result: dict[str, Any]) -> None:
    """Write what is known so far."""
    ratios = sorted(row["ratio"] for row in result.values())
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios) / len(ratios)
    facts = {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1], "within_a_tenth": within}
    save(options, "estimate_peak", {"summary": facts, "members": result})


if __name__ == "__main__":
    main()
