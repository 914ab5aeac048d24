"""A comparison from end to end: every stage is stored when it is done, so that a killed one goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from kinformer import __version__
from kinformer.comparison.badges import badges
from kinformer.comparison.cache import Cache, key_of
from kinformer.comparison.entrants import entrants, facts, settings_of
from kinformer.comparison.machine import machine
from kinformer.comparison.options import DEFAULT_STEPS, CompareOptions
from kinformer.comparison.plan import Clock, Contestant, contestants, guarded, still_in, with_length, with_tokenizer
from kinformer.comparison.record import Comparison, EntrantRecord, SeedRun, Trial
from kinformer.comparison.results import MachineFacts, SeedResult
from kinformer.comparison.speed import generation_speeds, length_speeds, memory_of, training_speeds
from kinformer.comparison.training import SWEEP_SHARE, curve, measured, run, sweep, sweep_steps, validations
from kinformer.estimation.estimate import estimate
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import require_utf8
from kinformer.runtime.lock import locked
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.training.metric import Metric

EVALUATION_SHARE, FIXED_SECONDS = 0.25, 12.0
"""Of the whole comparison's minutes what measuring takes, and of each member the seconds that do not shrink with it."""
VALIDATED = 1.15
"""What a step takes with its share of validations and checkpoints."""


@seeding
def compare(members: Sequence[str], options: CompareOptions, command: str) -> Comparison:
    """Train and measure ``members`` as ``options`` say.

    A member that fails is out, with the reason; the others go on. The report shows ``command``.

    Errors: ``KinformerError`` for what is wrong of all of them.
    """
    started_at = time.monotonic()
    if options.data == "-":
        raise KinformerError("`data` -: is read once, but every member reads the data; give the path of a file.")
    folder = Path(options.out)
    require_utf8(folder)
    options.prepare(options.seed)
    torch.manual_seed(options.seed)
    chosen = entrants(members, options.set)
    clock = Clock()
    with locked(folder):
        options = with_length(chosen, with_tokenizer(chosen, options))
        cache = Cache(folder / "cache")
        contestants_ = contestants(chosen, options)
        folder.mkdir(parents=True, exist_ok=True)
        metric = contestants_[0].task.metrics[0]
        for contestant in still_in(contestants_):
            with guarded(contestant, "its fact sheet"):
                contestant.results["facts"] = facts(contestant.entrant, contestant.config)
                contestant.results["max_length"] = contestant.results["facts"]["max_length"]
                contestant.results["flops_step"] = _flops(contestant)
        with clock("training speed"):
            training_speeds(contestants_, options, cache)
        steps = _steps(contestants_, options, cache, time.monotonic() - started_at)
        _note_plan(contestants_, options, steps)
        _train(contestants_, options, cache, clock, steps, metric)
        _measure(contestants_, options, cache, clock)
        where = machine(str(options.usable_device()))
        return _comparison(contestants_, options, clock, command, where, metric, steps)


def _flops(contestant: Contestant) -> float | None:
    """Return the FLOPs of a training step, None where they cannot be estimated."""
    base = contestant.base
    with suppress(Exception):
        settings = base.settings()
        estimated = estimate(contestant.config, length=settings.length, batch=settings.batch_size)
        return float(estimated.flops_step)
    return None


def _steps(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, spent: float) -> dict[str, int]:
    """Return the steps of a run, by contestant. Steps that depend on measured speeds are stored, so that a killed
    comparison goes on with the same."""
    left = still_in(contestants)
    if not left:
        raise KinformerError(f"no member can be trained: {contestants[0].name} {contestants[0].error}")
    if options.minutes is not None:
        return {contestant.name: max(1, round(60 * options.minutes / _step_seconds(contestant))) for contestant in left}
    if options.total_minutes is not None:
        key = key_of(
            [options.total_minutes, options.seeds, options.sweep, [contestant.model_key for contestant in left]]
        )
        shared = cache.once("steps", key, lambda: _steps_in(left, options, spent))
        return {contestant.name: shared for contestant in left}
    steps = options.steps or DEFAULT_STEPS
    if options.tokens is not None:
        steps = max(1, round(options.tokens / (options.row_length * options.batch_size)))
    return {contestant.name: steps for contestant in left}


def _step_seconds(contestant: Contestant) -> float:
    """Return the measured seconds of a training step of a contestant that is still in."""
    training = contestant.results["training"]
    assert training is not None
    return training["seconds"]


def _steps_in(left: Sequence[Contestant], options: CompareOptions, spent: float) -> int:
    """Return the steps per run that leave ``EVALUATION_SHARE`` of the total time for measuring."""
    assert options.total_minutes is not None
    seconds = (1 - EVALUATION_SHARE) * 60 * options.total_minutes - spent - FIXED_SECONDS * len(left)
    seconds_of_all = sum(_step_seconds(contestant) for contestant in left)
    tried = (options.sweep + 1 if options.sweep else 0) / SWEEP_SHARE  # one more, where an optimum stands at an end
    steps = int(seconds / (seconds_of_all * VALIDATED * (options.seeds + tried)))
    if steps < 20:
        raise KinformerError(
            f"`total_minutes` {options.total_minutes:g}: suffices for {plural(max(0, steps), 'step')} a run; give more "
            "minutes, or fewer members, seeds or `parameters`."
        )
    return steps


def _note_plan(contestants: Sequence[Contestant], options: CompareOptions, steps: dict[str, int]) -> None:
    for contestant in still_in(contestants):
        seconds, count = _step_seconds(contestant), steps[contestant.name]
        trials = options.sweep * sweep_steps(options, count)
        total = seconds * (count * options.seeds + trials)
        note(
            f"{contestant.name}: {plural(contestant.parameters, 'parameter')}, {options.seeds} x "
            f"{plural(count, 'step')} and {trials} of the sweep, about {total / 60:.1f} minutes"
        )


def _train(
    contestants: Sequence[Contestant],
    options: CompareOptions,
    cache: Cache,
    clock: Clock,
    steps: dict[str, int],
    metric: Metric,
) -> None:
    """Run the sweeps, then the seeds one after the other, so that all contestants have one run before any has two."""
    for contestant in still_in(contestants):
        with clock("sweeps"), guarded(contestant, "the sweep"):
            sweep(contestant, options, cache, steps[contestant.name], metric)
    for number in range(options.seeds):
        for contestant in still_in(contestants):
            with guarded(contestant, f"seed {options.seed + number}"):
                _one_seed(
                    contestant,
                    options,
                    cache,
                    clock,
                    steps[contestant.name],
                    number,
                    baseline=contestant is contestants[0],
                )


def _one_seed(
    contestant: Contestant, options: CompareOptions, cache: Cache, clock: Clock, steps: int, number: int, baseline: bool
) -> None:
    seed, metric = options.seed + number, contestant.task.metrics[0]
    with clock("training"):
        lr, settings = contestant.results["lr"], validations(options, steps)
        done = run(contestant, options, cache, lr, seed, steps, keeps=True, **settings)
    if "diverged" in done:
        raise KinformerError(done["diverged"])
    with clock("measuring"):
        tested = measured(contestant, options, cache, done, number == 0, baseline and number == 0)
    contestant.results.setdefault("runs", []).append({**done, "seed": seed, "measured": tested})
    note(f"{contestant.name}, seed {seed}: {metric.text(tested['figures'][metric.name])}")


def _measure(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, clock: Clock) -> None:
    """Measure what does not depend on the weights: speeds in turns, memory, the battery."""
    with clock("measuring"):
        generation_speeds(contestants, options, cache)
        length_speeds(contestants, options, cache)
    for contestant in still_in(contestants):
        with clock("measuring"), guarded(contestant, "measuring memory"):
            contestant.results["memory"] = memory_of(contestant, options, cache)
        with clock("battery"), guarded(contestant, "the battery"):
            key = key_of([__version__, torch.__version__, contestant.entrant.parts, dict(contestant.entrant.changes)])
            contestant.results["badges"] = cache.once("badges", key, lambda item=contestant: badges(item.entrant))  # type: ignore[misc]


def _comparison(
    contestants: Sequence[Contestant],
    options: CompareOptions,
    clock: Clock,
    command: str,
    where: MachineFacts,
    metric: Metric,
    steps: dict[str, int],
) -> Comparison:
    tested = [
        one["measured"] for contestant in contestants for one in contestant.results.get("runs", ()) if "measured" in one
    ]
    baselines: dict[str, float] = next(
        (contestant["baselines"] for contestant in tested if contestant["baselines"]), {}
    )
    largest = max((contestant.parameters for contestant in contestants), default=0)
    return Comparison(
        kinformer=__version__,
        created=time.strftime("%Y-%m-%d"),
        command=command,
        task=contestants[0].task.name,
        figure=metric.name,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        data=tested[0]["data"] if tested else contestants[0].identity,
        baselines=baselines,
        budget={
            "parameters": options.parameters
            or next((contestant.parameters for contestant in contestants if contestant.parameters), largest),
            "steps": sorted(set(steps.values())),
            "minutes": options.minutes,
            "total_minutes": options.total_minutes,
            "tokens_step": options.row_length * options.batch_size,
            "seeds": options.seeds,
            "sweep_steps": sorted({sweep_steps(options, count) for count in steps.values()}),
        },
        settings=settings_of(contestants[0].base.settings()),
        seconds={stage: round(seconds, 2) for stage, seconds in clock.seconds.items()},
        entrants=tuple(_record(contestant, options, where, metric) for contestant in contestants),
    )


def _record(contestant: Contestant, options: CompareOptions, where: MachineFacts, metric: Metric) -> EntrantRecord:
    got, base = contestant.results, contestant.base
    page = got.get("facts") or {}
    settings = settings_of(base.settings()) | {
        "lr": got.get("lr"),
        "own": dict(base.task_options),
        "recipe": base.recipe,
    }
    runs = [one for one in got.get("runs", ()) if "measured" in one]
    return EntrantRecord(
        name=contestant.name,
        spec=contestant.entrant.spec,
        set={
            path: value if isinstance(value, dict) else str(value) for path, value in contestant.entrant.changes.items()
        },
        facts=page,
        parameters=contestant.parameters,
        flops_step=got.get("flops_step"),
        error=contestant.error,
        sweep=tuple(Trial(**trial) for trial in got.get("sweep", ())),
        lr=got.get("lr"),
        moved=got.get("moved"),
        runs=tuple(_seed_run(contestant, one, metric) for one in runs),
        state_bytes=page.get("state_bytes", {}),
        training=got.get("training"),
        generation=got.get("generation"),
        lengths=got.get("lengths"),
        memory=got.get("memory"),
        badges=got.get("badges", []),
        machine=where,
        settings={name: value for name, value in settings.items() if name != "seed"},
    )


def _seed_run(contestant: Contestant, one: SeedResult, metric: Metric) -> SeedRun:
    tested = one["measured"]
    return SeedRun(
        seed=one["seed"],
        value=tested["figures"][metric.name],
        figures=tested["figures"],
        steps=one["steps"],
        seconds=one["seconds"],
        curve=tuple(curve(one, metric, contestant.results.get("flops_step"))),
        contexts=tested["contexts"],
        command=one["command"],
    )
