"""Entrants side by side in equal minutes of one processor, trained as `kinformer compare` trains them.

Two stages, which may run on different machines: :func:`begun` measures the speeds in turns and turns minutes into
steps; :func:`train` runs what a result lacks of its seeds, several runs at once, on a CPU or a GPU. What a run learns
depends on its steps and its seed, not on how fast they pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from common import arguments, save, show
from kinformer.lab.comparison.options import CompareOptions
from kinformer.lab.comparison.plan import Contestant, contestants, entrants, still_in, with_tokenizer
from kinformer.lab.comparison.record import Cache
from kinformer.lab.comparison.speed import machine, training_speeds
from kinformer.lab.comparison.training import measured, run, validations
from kinformer.runtime.errors import KinformerError

TRAINING: dict[str, Any] = {
    "sweep": 0, "lr": 0.01, "parameters": 800_000, "train_tokenizer": 4096, "ema": 0.07, "batch_size": 2,
    "length": 256, "first": 100_000, "contexts": "1x", "lengths": "512",
}  # fmt: skip
"""How every entrant is trained and measured."""


class Job(NamedTuple):
    """One run: the entrant ``spec`` with its ``changes``, by PATH for all and NAME:PATH for it alone."""

    name: str
    spec: str
    changes: dict[str, Any]
    steps: int
    seed: int
    baseline: bool
    """Whether counting is measured, too."""


class Measured(NamedTuple):
    """Bits per byte of held-out text, of the run and of counting."""

    bits: float
    baselines: dict[str, float]


def parser(description: str | None, minutes: float) -> argparse.ArgumentParser:
    """The options of both stages."""
    options = arguments(description)
    options.add_argument("--data", default="stdlib", help="a text file (the standard library's sources if not given)")
    options.add_argument("--minutes", type=float, default=minutes, help="the budget of each run")
    options.add_argument("--members", nargs="+", help="only these")
    options.add_argument("--seed", type=int, default=0, help="the first seed")
    options.add_argument("--seeds", type=int, default=1, help="how many seeds; with 0 only speeds are measured")
    options.add_argument("--runs", type=Path, help="keep what is computed here")
    options.add_argument("--add", type=Path, help="train the seeds that this result file lacks, with its steps")
    options.add_argument("--jobs", type=int, default=1, help="how many runs at once")
    options.add_argument("--device", default="auto", help="cpu or cuda; a GPU if there is one")
    return options


def compare(name: str, options: argparse.Namespace, specs: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The result of both stages, saved under ``name`` after every run; ``--add`` leaves the first one out."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        if options.add:
            result = json.loads(options.add.read_text(encoding="utf-8"))
        else:
            result = begun(options, folder, specs, changes)
            save(options, name, result)
        for job, values in train(options, folder, jobs(options, result, specs, changes), result["minutes"]):
            row = next(row for row in result["members"] if row["name"] == job.name)
            row["bits_per_byte"][str(job.seed)] = values.bits
            result["baselines"] |= values.baselines
            row.setdefault("devices", {})[str(job.seed)] = device_name(options)
            save(options, name, result)
    table = [
        [row["name"], statistics.mean(bits), max(bits) - min(bits), len(bits), row["steps"]]
        for row in result["members"]
        if not row["error"] and (bits := list(row["bits_per_byte"].values()))
    ]
    header = ("entrant", "mean", "spread", "seeds", "steps")
    show("bits per byte on held-out text", header, sorted(table, key=lambda line: line[1]))
    return result


def begun(
    options: argparse.Namespace,
    folder: Path,
    specs: Sequence[str],
    changes: Mapping[str, Any],
    speeds: Callable[[Sequence[Contestant], CompareOptions, Cache], None] = training_speeds,
) -> dict[str, Any]:
    """A result without runs: the parameters of every entrant, and the steps that the minutes buy by speeds in turns."""
    settings = _settings(options, folder, changes, options.minutes, options.rounds or 3)
    all_ = _contestants(specs, settings)
    speeds(all_, settings, Cache(folder / "cache"))
    rows = []
    for item in all_:
        row: dict[str, Any] = {"name": item.name, "parameters": item.parameters, "error": item.error}
        if item.error is None:
            seconds = item.record.training["seconds"]
            steps = 3 if options.quick else max(1, round(60 * options.minutes / seconds))
            row |= {"bits_per_byte": {}, "steps": steps, "seconds_per_step": seconds}
        rows.append(row)
    data = next(item.identity for item in still_in(all_))
    return {"minutes": options.minutes, "members": rows, "data": data, "baselines": {}, "settings": TRAINING}


def jobs(
    options: argparse.Namespace, result: Mapping[str, Any], specs: Sequence[str], changes: Mapping[str, Any]
) -> list[Job]:
    """The runs that the result lacks, the longest first."""
    rows = {row["name"]: row for row in result["members"] if not row["error"]}
    missing = []
    for seed in range(options.seed, options.seed + options.seeds):
        for spec in specs:
            name = spec.partition("=")[0]
            if name not in rows or str(seed) in rows[name]["bits_per_byte"]:
                continue
            own = {path: value for path, value in changes.items() if path.partition(":")[0] == name or ":" not in path}
            baseline = not result["baselines"] and not missing
            missing.append(Job(name, spec, own, rows[name]["steps"], seed, baseline))
    return sorted(missing, key=lambda job: -rows[job.name]["seconds_per_step"] * job.steps)


def train(
    options: argparse.Namespace, folder: Path, todo: Sequence[Job], minutes: float
) -> Iterator[tuple[Job, Measured]]:
    """Each run with its bits per byte of held-out text, as it ends; one that fails is told and left out."""
    if not todo:
        return
    _contestants([todo[0].spec], _settings(options, folder, todo[0].changes, minutes, 1))  # the shared tokenizer
    if options.jobs == 1:
        for job in todo:
            yield job, bits_of(options, folder, job, minutes)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Measured], Job] = {
            pool.submit(bits_of, options, folder, job, minutes): job for job in todo
        }
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    yield job, future.result()
                except (KinformerError, RuntimeError) as error:
                    print(f"{job.name}, seed {job.seed}: {error}", flush=True)


def bits_of(options: argparse.Namespace, folder: Path, job: Job, minutes: float) -> Measured:
    """Train one run as a comparison does, and measure it on held-out text."""
    settings = _settings(options, folder, job.changes, minutes, 1)
    settings.prepare(job.seed)
    (contestant,), cache = _contestants([job.spec], settings), Cache(folder / "cache")
    if contestant.error is not None:
        raise KinformerError(contestant.error)
    done = run(contestant, settings, cache, settings.middle, job.seed, job.steps, **validations(settings, job.steps))
    if "diverged" in done:
        raise KinformerError(done["diverged"])
    values = measured(contestant, settings, cache, done, False, job.baseline)
    return Measured(float(values["figures"]["bits_per_byte"]), dict(values["baselines"] or {}))


def device_name(options: argparse.Namespace) -> str:
    """The name of the GPU, or of the processor."""
    device = str(CompareOptions(device=options.device).usable_device())
    facts = machine(device)
    return str(facts["processor"] if device == "cpu" else facts["device"])


def _settings(
    options: argparse.Namespace, folder: Path, changes: Mapping[str, Any], minutes: float, rounds: int
) -> CompareOptions:
    return CompareOptions(
        data=options.data, out=str(folder), set=changes, minutes=minutes, rounds=rounds,
        device=options.device, threads=options.threads, **TRAINING,
    )  # fmt: skip


def _contestants(specs: Sequence[str], settings: CompareOptions) -> list[Contestant]:
    """The entrants at the budget of parameters, with the one tokenizer of the folder."""
    settings.prepare(settings.seed)
    chosen = entrants(specs, settings.set)
    return contestants(chosen, with_tokenizer(chosen, settings))
