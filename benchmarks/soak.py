"""Do random operations on random compositions, and kills of random runs, ever break a law?

    python benchmarks/soak.py --minutes 60 --seed 1              # alternately states (soak_states) and runs (soak_runs)
    python benchmarks/soak.py --merge A.json B.json              # one result of several
    python benchmarks/soak.py --replay 1/states/17               # one trial again, with its traceback

States: a random composition in float64 absorbs chunks with padding and resets; its states are forked, selected,
repeated, joined, reserved, detached, renewed and saved. Runs: a random member trains on a task, is killed, resumes.
Every violation is told in full, and ends the script with 1 when the time is over.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401

import kinformer.lab.runs.train
import kinformer.lab.training.loop  # noqa: F401
import soak_runs
import soak_states
from common import arguments, prepare, save, show
from kinformer.family.kinds import kinds

TRIALS = {"states": soak_states.trial, "runs": soak_runs.trial}
BATCH, EVERY = 20.0, 120.0
"""Seconds that states are tried for between two runs; seconds between two writings of the result."""
SUMS = ("compositions", "refusals", "operations", "runs", "runs_refused", "kills", "seconds", "processor_seconds")


def tried(name: str) -> dict[str, Any]:
    """One trial, called SEED/KIND/NUMBER: its outcome, and all that tells it."""
    found: dict[str, Any] = {"trial": name}
    try:
        found["outcome"] = TRIALS[name.split("/")[1]](random.Random(name), found)
    except Exception as error:
        found |= {"outcome": "failed", "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    return found


def batch(seed: int, first: int, until: float, file: Path) -> int:
    """Trials of states from number ``first`` on, told line by line in ``file``."""
    with file.open("w", encoding="utf-8") as lines:
        while time.monotonic() < until:
            print(json.dumps({"begun": first}), file=lines, flush=True)
            print(json.dumps(tried(f"{seed}/states/{first}")), file=lines, flush=True)
            first += 1
    return 0


class Soak:
    """Counts so far; this process computes nothing itself, so that its forks may."""

    def __init__(self, options: Any) -> None:
        self.options, self.begun = options, time.monotonic()
        self.numbers = {"states": 0, "runs": 0}
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.violations: list[dict[str, Any]] = []

    def run(self) -> None:
        """Both kinds in turns until the time is over."""
        end, written = self.begun + 60 * self.options.minutes, self.begun
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            while time.monotonic() < end:
                self._states(Path(folder), min(end, time.monotonic() + BATCH))
                if time.monotonic() < end:
                    self.add(tried(f"{self.options.seed}/runs/{self.numbers['runs']}"))
                    self.numbers["runs"] += 1
                if time.monotonic() > written + EVERY:
                    written = time.monotonic()
                    self.write()
        self.write()

    def _states(self, folder: Path, until: float) -> None:
        first, file = self.numbers["states"], folder / "trials"
        try:
            code, said = soak_runs.forked(lambda: batch(self.options.seed, first, until, file), folder)
        except soak_runs.UnfinishedError as error:
            code, said = 1, str(error)
        told = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for found in told:
            if "trial" in found:
                self.add(found)
        last = max(found.get("begun", first) for found in told)
        if code:
            name = f"{self.options.seed}/states/{last}"
            self.add({"trial": name, "outcome": "failed", "error": f"the process ended with {code}: {said[-2000:]}"})
        self.numbers["states"] = last + 1

    def add(self, found: dict[str, Any]) -> None:
        """Count a trial; one that failed is told."""
        outcome, runs = found["outcome"], found["trial"].split("/")[1] == "runs"
        if outcome == "refused":
            self.counts["runs_refused" if runs else "refusals"] += 1
            self.reasons[found["why"]] += 1
        else:
            self.counts["runs" if runs else "compositions"] += 1
        self.counts["operations"] += len(found.get("operations", ()))
        self.counts["kills"] += sum(kill["ended"] < 0 for kill in found.get("kills", ()))
        if outcome == "failed":
            self.violations.append(found)
            print(f"FAILED {found['trial']}: {found['error'][:2000]}", flush=True)

    def write(self) -> None:
        self.counts["seconds"] = round(time.monotonic() - self.begun)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.counts["processor_seconds"] = round(used.ru_utime + used.ru_stime)
        save(self.options, "soak", result([self.options.seed], self.counts, self.reasons, self.violations))


def result(seeds: list[int], counts: Any, reasons: Any, violations: list[dict[str, Any]]) -> dict[str, Any]:
    """What a result file holds."""
    common = dict(Counter(reasons).most_common(40))
    return {"seeds": seeds} | {name: counts[name] for name in SUMS} | {"violations": violations, "reasons": common}


def merged(paths: list[Path]) -> dict[str, Any]:
    """One result of several."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    counts, reasons = Counter(), Counter()
    for each in found:
        counts.update({name: each[name] for name in SUMS})
        reasons.update(each["reasons"])
    seeds = [seed for each in found for seed in each["seeds"]]
    return result(seeds, counts, reasons, [failed for each in found for failed in each["violations"]])


def table(told: dict[str, Any]) -> int:
    """Print a result; 1 if a law was broken."""
    rows = [[name.replace("_", " "), told[name]] for name in SUMS] + [["violations", len(told["violations"])]]
    show("soak", ("what", "count"), rows)
    return 1 if told["violations"] else 0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="decides all that is drawn")
    parser.add_argument("--merge", type=Path, nargs="+", help="result files to make one of, written to --out")
    parser.add_argument("--replay", help="one trial, as a violation calls it: SEED/KIND/NUMBER")
    parser.set_defaults(threads=1)
    options = prepare(parser)
    warnings.simplefilter("ignore")
    kinds()
    if options.replay:
        found = tried(options.replay)
        print(json.dumps(found, indent=1), found.get("where", ""), sep="\n")
        return int(found["outcome"] == "failed")
    if options.merge:
        told = merged(options.merge)
        save(options, "soak", told)
        return table(told)
    options.minutes = 0.5 if options.quick else options.minutes
    soak = Soak(options)
    soak.run()
    return table(result([options.seed], soak.counts, soak.reasons, soak.violations))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
