"""The runs of a comparison: a sweep of learning rates for every contestant, then one run for every seed."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kinformer.lab.comparison.options import MEASURED_BYTES, CompareOptions
from kinformer.lab.comparison.plan import Contestant
from kinformer.lab.comparison.record import Cache, ContextValue, Measurement, Point, RunResult, Trial, file_name, key_of
from kinformer.lab.runs.inference import evaluate
from kinformer.lab.runs.options import EvaluateOptions, TrainOptions
from kinformer.lab.runs.run import CONFIG
from kinformer.lab.runs.train import train
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.logging import METRICS, Metric
from kinformer.lab.training.settings import PARTS_OF_A_RUN, Settings
from kinformer.runtime.errors import RARE, KinformerError, flag_of, plural
from kinformer.runtime.parsing import JsonObject, parse_json_line
from kinformer.runtime.progress import note

MAX_MOVES = 4
SWEEP_SHARE, MIN_SWEEP = 5, 20
SWEEP_TOKENS = 16384
"""Validation tokens of a run of the sweep."""
MAX_TOKENS, MIN_TOKENS, VALIDATED_SHARE = 65536, 4096, 40
ATTEMPTS = 3
WEIGHTS_OF_A_RUN = "checkpoints"


def sweep_steps(options: CompareOptions, steps: int) -> int:
    """Return the steps of a run of the sweep."""
    return options.sweep_steps or min(steps, max(MIN_SWEEP, steps // SWEEP_SHARE))


def validated(options: CompareOptions, steps: int) -> int:
    """Return the tokens of a validation: a fortieth of the tokens of a run, within bounds."""
    tokens = steps * options.row_length * (options.batch_size or 1) // VALIDATED_SHARE
    return min(MAX_TOKENS, max(MIN_TOKENS, tokens))


def validations(options: CompareOptions, steps: int) -> dict[str, Any]:
    """Return the settings of ten validations of a run, all runs on the same tokens, fewer for short runs."""
    tokens = SWEEP_TOKENS if options.minutes is not None else validated(options, steps)
    return {"validation_tokens": tokens, "validate_every": -(-steps // PARTS_OF_A_RUN)}


def sweep(contestant: Contestant, options: CompareOptions, cache: Cache, steps: int, metric: Metric) -> None:
    """Record the ``sweep`` (learning rates with their metrics), the best ``lr``, and ``moved``, a sentence about a
    sweep that continues because the best learning rate is at an end."""
    short = sweep_steps(options, steps)
    if not options.sweep:
        contestant.note(lr=options.middle)
        return
    half = (options.sweep - 1) // 2
    powers = list(range(-half, options.sweep - half))
    tried: dict[int, float | None] = {}
    moves = 0
    while True:
        for power in powers:
            if power not in tried:
                tried[power] = _trial(contestant, options, cache, short, power, metric)
        finite = {power: value for power, value in tried.items() if value is not None}
        if not finite:
            lowest = f"give a lower `lr` than {options.middle:g}"
            raise KinformerError(f"training diverged at every learning rate tried; {lowest}.")
        best = (min if metric.lower_is_better else max)(finite, key=lambda power: finite[power])
        beyond = best - 1 if best == min(tried) else best + 1 if best == max(tried) else None
        if beyond is None or moves == MAX_MOVES:
            break
        powers, moves = [beyond], moves + 1
    trials = tuple(Trial(lr=options.middle * 2.0**power, validation=value) for power, value in sorted(tried.items()))
    moved = None
    if moves or beyond is not None:
        now = "now inside it" if beyond is None else "still at its end"
        moved = f"the best rate of the first sweep was its lowest or highest, so it continued; the best is {now}."
    contestant.note(sweep=trials, lr=options.middle * 2.0**best, moved=moved)


def _trial(
    contestant: Contestant, options: CompareOptions, cache: Cache, steps: int, power: int, metric: Metric
) -> float | None:
    lr = options.middle * 2.0**power
    settings = {"validate_every": steps, "validation_tokens": SWEEP_TOKENS, "checkpoint_every": 0, "keep": 1}
    done = run(contestant, options, cache, lr, options.seed, steps, keeps=False, **settings)
    value = done.get("validation", {}).get(metric.name)
    value_text = metric.text(value) if value is not None else "diverged"
    note(f"{contestant.name}: learning rate {lr:g}, {plural(steps, 'step')}: validation {value_text}")
    return value


def run(
    contestant: Contestant,
    options: CompareOptions,
    cache: Cache,
    lr: float,
    seed: int,
    steps: int,
    keeps: bool = True,
    **settings: int,
) -> RunResult:
    """Train one run, or return its stored result. Without ``keeps``, the run folder is removed after the run."""
    planned = contestant.options(Path(options.out), lr, seed, steps, **settings)
    key = contestant.run_key(planned)
    cached: RunResult | None = cache.get("run", key)
    if cached is not None:
        return cached
    folder = Path(options.out) / "runs" / f"{file_name(contestant.name)}-{key}"
    planned = replace(planned, out=str(folder))
    _count_attempt(cache, key, folder)
    resumes = (folder / CONFIG).is_file()
    try:
        summary = train(replace(planned, resume=resumes), quiet=True)
    except KinformerError as error:
        if "diverged" not in str(error):
            raise
        result: RunResult = {"diverged": str(error)}
    else:
        if summary.result.signal:
            raise KeyboardInterrupt
        result = {
            "folder": folder.name,
            "validation": dict(summary.result.validation),
            "steps": summary.result.steps,
            "seconds": summary.result.seconds,
            "log": log_of(folder),
            "command": command_of(planned),
        }
    cache.put("run", key, result)
    cache.path("attempts", key).unlink(missing_ok=True)
    shutil.rmtree(folder / WEIGHTS_OF_A_RUN, ignore_errors=True)  # the best weights are beside them
    if not keeps:
        shutil.rmtree(folder, ignore_errors=True)  # a sweep needs only the metric
    return result


def log_of(folder: Path) -> list[JsonObject]:
    """Return the records in the log of a run."""
    return [
        parse_json_line(folder / METRICS, number, line, "delete the run's folder, it is trained again")
        for number, line in enumerate((folder / METRICS).read_text(encoding="utf-8").splitlines(), start=1)
    ]


def _count_attempt(cache: Cache, key: str, folder: Path) -> None:
    """Count an attempt, and refuse a run that ended its process several times before the first checkpoint."""
    if Checkpoints(folder / WEIGHTS_OF_A_RUN, 1).steps():
        return
    before = cache.get("attempts", key) or 0
    if before >= ATTEMPTS:
        cache.path("attempts", key).unlink()
        what = f"its process ended {before} times before its first checkpoint, as when memory is short"
        raise KinformerError(f"{what}; choose smaller sizes.")
    cache.put("attempts", key, before + 1)


def curve(run: RunResult, metric: Metric, flops_step: float | None) -> tuple[Point, ...]:
    """Return the validations of a run as points, with the seconds of training until each validation."""
    points: list[Point] = []
    seconds: dict[int, float] = {}
    for line in run["log"]:
        if "seconds" in line:
            seconds[line["step"]] = line["seconds"]
        if (value := line.get(f"validation_{metric.name}")) is not None:
            step = line["step"]
            flops = None if flops_step is None else flops_step * step
            points.append(Point(step=step, validation=value, seconds=seconds.get(step), flops=flops))
    return tuple(points)


def contexts_of(options: CompareOptions) -> dict[str, int]:
    """Return the tokens of each length of context, by its text."""
    parts = [part.strip() for part in options.contexts.split(",")]
    return {part: int(part.removesuffix("x")) * (options.row_length if part[-1] == "x" else 1) for part in parts}


def measured(
    contestant: Contestant, options: CompareOptions, cache: Cache, done: RunResult, first: bool, baseline: bool
) -> Measurement:
    """Return the results of a run on the test split; of the ``first`` seed also by position and at further contexts."""
    task = contestant.task
    option_fields = {field.name for field in fields(task.EvaluationOptions)}
    task_options: dict[str, object] = {}
    if first and "contexts" in option_fields:
        limit = contestant.record.facts.get("max_length")
        possible = [part for part, tokens in contexts_of(options).items() if limit is None or tokens <= limit]
        task_options["contexts"] = ",".join(possible) or "1x"
    if baseline and "baseline" in option_fields:
        task_options["baseline"] = True
    limits = {"first": options.first or (MEASURED_BYTES if task.data.running_text else None), "seed": options.seed}
    settings: dict[str, Any] = {name: limits[name] for name in limits.keys() - task.evaluation.refused.keys()}
    max_bytes = settings.get("first") if task.data.running_text else None
    evaluation_options = EvaluateOptions(
        device=options.device, threads=options.threads, task_options=task_options, **settings
    )

    def make() -> Measurement:
        folder = Path(options.out) / "runs" / done["folder"]
        evaluation = evaluate([folder], evaluation_options, quiet=True).evaluations[0]
        facts, further = evaluation.facts, evaluation.facts.get("lengths", ())
        assert isinstance(further, list | tuple)
        lengths = {item["context"]: _context(item) for item in (facts, *further) if "context" in item}
        return {
            "figures": dict(evaluation.metrics),
            "units": [[unit.name, unit.unit, unit.lower_is_better] for unit in evaluation.units],
            "baselines": dict(evaluation.baselines),
            "data": dict(evaluation.data) | {"max_bytes": max_bytes},
            "contexts": list(lengths.values()) if first else [],
        }

    return cache.once("measured", key_of([done["folder"], max_bytes, task_options]), make)


def _context(facts: JsonObject) -> ContextValue:
    return {"context": facts["context"], "test": facts["bits_per_byte"], "positions": list(facts["by_position"])}


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, Mapping | Sequence) and not isinstance(value, str) else str(value)


def command_of(options: TrainOptions) -> str:
    """Return the command line that trains a run with these options."""
    words = ["kinformer", "train", options.member]
    plain = {item.name: item.default for item in fields(Settings)}
    for field in fields(TrainOptions):
        value = getattr(options, field.name)
        if field.name in ("member", "set", "task_options", "resume", "out") or value is None:
            continue
        usual = field.name in plain and value == plain[field.name] and field.name != "length"
        if value != field.default and not usual:
            text = f"{value:g}" if isinstance(value, float) else _text(value)
            rare = [flag_of("set"), f"training.{field.name}={text}"]
            words += rare if field.name in RARE else [flag_of(field.name), text]
    for name, value in options.task_options.items():
        words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    for path, value in options.set.items():
        words += [flag_of("set"), f"{path}={_text(value)}"]
    return shlex.join([*words, flag_of("out"), "DIR"])
