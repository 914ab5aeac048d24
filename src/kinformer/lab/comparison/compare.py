"""A comparison from end to end. Every finished stage is stored, so a killed comparison continues at the next stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path

import torch

from kinformer import __version__
from kinformer.lab.comparison import words
from kinformer.lab.comparison.budget import MOST_SEEDS, SEED_STEPS, Turns, open_turn, plan_text, rate, with_sizes
from kinformer.lab.comparison.options import CompareOptions, planned
from kinformer.lab.comparison.plan import (
    Clock,
    Contestant,
    Sizes,
    contestants,
    entrants,
    facts,
    guarded,
    still_in,
    with_length,
    with_tokenizer,
)
from kinformer.lab.comparison.record import (
    Cache,
    Comparison,
    EntrantRecord,
    MachineFacts,
    RunResult,
    SeedRun,
    key_of,
    merged,
    read,
    save,
)
from kinformer.lab.comparison.report import columns, markdown, ordered, page
from kinformer.lab.comparison.speed import generation_speeds, length_speeds, machine, memory_of, training_speeds
from kinformer.lab.comparison.training import curve, measured, run, sweep, sweep_steps, validations
from kinformer.lab.comparison.words import departures
from kinformer.lab.estimation.estimate import estimate
from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.training.settings import DEFAULT_STEPS, Settings
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import locked, reading, require_utf8, write_atomic
from kinformer.runtime.progress import note

MEASURED_SHARE = 0.15
"""The share of the total minutes for speeds and memory; twice as much for the uses speed and memory."""


@seeding
def compare(
    members: Sequence[str], options: CompareOptions, command: str, started_at: float | None = None
) -> Comparison:
    """Train and measure ``members`` by ``options``. A member that fails is out, with a reason, and the others continue.
    The report shows ``command``. The total minutes count from ``started_at``, by ``time.monotonic()``.

    Errors: ``KinformerError`` for a mistake that concerns all members.
    """
    started_at = time.monotonic() if started_at is None else started_at
    if options.data == "-":
        raise KinformerError("`data` -: is read once, but every member reads the data; give the path of a file.")
    folder = Path(options.out)
    require_utf8(folder)
    options.prepare(options.seed)
    torch.manual_seed(options.seed)
    chosen = entrants(members, options.set)
    clock, sizes = Clock(), Sizes()
    with locked(folder):
        cache = Cache(folder / "cache")
        if options.total_minutes is not None:
            note(f"{', '.join(item.name for item in chosen)}: measuring this machine, to choose sizes and steps")
            options, sizes = with_sizes(chosen, options, cache)
        else:
            options = replace(
                options, seeds=options.seeds or 1, sweep=3 if options.sweep is None else options.sweep,
                batch_size=options.batch_size or Settings.batch_size, precision=options.precision or "fp32",
            )  # fmt: skip
            options = with_length(chosen, with_tokenizer(chosen, options))
        contestants_ = contestants(chosen, options, sizes)
        folder.mkdir(parents=True, exist_ok=True)
        metric = contestants_[0].task.metrics[0]
        for contestant in still_in(contestants_):
            with guarded(contestant, "its fact sheet"):
                sheet = facts(contestant.entrant, contestant.config)
                contestant.note(facts=sheet, state_bytes=sheet["state_bytes"], flops_step=_flops(contestant))
        if options.total_minutes is not None:
            end = started_at + 60 * options.total_minutes
            options = _within(contestants_, options, sizes, cache, clock, end)
        else:
            _by_steps(contestants_, options, cache, clock)
    where, first = machine(str(options.usable_device())) | {"computing": clock.share}, contestants_[0]
    tested = [item for contestant in contestants_ for item in contestant.measured]
    made = {run.steps for contestant in contestants_ for run in contestant.record.runs}
    count = options.parameters or next((item.parameters for item in contestants_ if item.parameters), 0)
    return Comparison(
        kinformer=__version__,
        created=time.strftime("%Y-%m-%d"),
        command=command,
        task=first.task.name,
        figure=metric.name,
        unit=metric.unit,
        lower_is_better=metric.lower_is_better,
        data=tested[0]["data"] if tested else first.identity,
        baselines=next((item["baselines"] for item in tested if item["baselines"]), {}),
        budget={
            "parameters": count,
            "steps": sorted(made),
            "minutes": options.minutes,
            "total_minutes": options.total_minutes,
            "tokens_step": options.row_length * (options.batch_size or 1),
            "seeds": options.seeds or 1,
            "use": options.for_,
            "sweep_steps": sorted({sweep_steps(options, count) for count in made}) if options.sweep else [],
        },
        settings=dict(vars(first.base.settings())),
        seconds={stage: round(seconds, 2) for stage, seconds in clock.seconds.items()},
        entrants=tuple(_record(contestant, where) for contestant in contestants_),
    )


def _by_steps(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, clock: Clock) -> None:
    """Train every contestant at the best learning rate of a sweep, one run after the other, and measure all."""
    metric, seeds = contestants[0].task.metrics[0], options.seeds or 1
    with clock("training speed"):
        training_speeds(contestants, options, cache)
    steps = _steps(contestants, options)
    for contestant in still_in(contestants):
        seconds, count = _step_seconds(contestant), steps[contestant.name]
        trials = options.sweep * sweep_steps(options, count) if options.sweep else 0
        note(
            f"{contestant.name}: {plural(contestant.parameters, 'parameter')}, {seeds} x {plural(count, 'step')} and "
            f"{trials} of the sweep, about {seconds * (count * seeds + trials) / 60:.1f} minutes and validations"
        )
    for contestant in still_in(contestants):
        with clock("sweeps"), guarded(contestant, "the sweep"):
            sweep(contestant, options, cache, steps[contestant.name], metric)
    for seed in range(options.seed, options.seed + seeds):  # all contestants have one run before any contestant has two
        for contestant in still_in(contestants):
            count = steps[contestant.name]
            with guarded(contestant, f"seed {seed}"):
                with clock("training"):
                    assert contestant.record.lr is not None
                    lr, checks = contestant.record.lr, validations(options, count)
                    done = run(contestant, options, cache, lr, seed, count, **checks)
                if "diverged" in done:
                    raise KinformerError(done["diverged"])
                _test(contestant, options, cache, clock, done, seed, contestant is contestants[0])
    _measure(contestants, options, cache, clock)


def _within(
    contestants: Sequence[Contestant], options: CompareOptions, sizes: Sizes, cache: Cache, clock: Clock, end: float
) -> CompareOptions:
    """Train the contestants in turns and measure them until ``end``, and return the options with the number of seeds. A
    second call with the same options only reports the stored runs."""
    for contestant in still_in(contestants):
        contestant.note(lr=rate(contestant, options))
    key = key_of([options.total_minutes, options.seeds, options.seed, options.first,
                  [[item.model_key, item.record.lr] for item in still_in(contestants)]])  # fmt: skip
    stored, began = cache.get("turns", key), time.monotonic()
    measured_until = began + MEASURED_SHARE * (1 + (options.for_ in ("speed", "memory"))) * (end - began)
    if stored is None:
        seed = options.seed
        with clock("training"):
            first = [open_turn(item, options, seed, sizes.steps, end) for item in still_in(contestants)]
            turns = Turns(first, options, end, measured_until - began)
            seeds = options.seeds or min(MOST_SEEDS, max(1, turns.steps // SEED_STEPS))
            more = [(item, seed + number) for number in range(1, seeds) for item in still_in(contestants)]
            turns.add([open_turn(item, options, number, sizes.steps, end) for item, number in more])
        for contestant in still_in(contestants):
            count = plural(contestant.parameters, "parameter")
            note(f"{contestant.name}: {count}, learning rate {contestant.record.lr:g}")
        turns.share = clock.share or 1.0
        for sentence in (*plan_text(turns), words.busy(clock.share)):
            if sentence:
                note(sentence)
        _measure(contestants, options, cache, clock, measured_until)
        with clock("training"):
            turns.train()
        measured_bytes = min(turns.most_bytes, turns.test_bytes(end - time.monotonic()))
        runs = [[turn.contestant.name, turn.seed, turn.result] for turn in turns.turns]
        speeds = {turn.contestant.name: turn.per_step for turn in turns.turns}
        stored = {"runs": runs, "bytes": measured_bytes, "seeds": seeds, "speeds": speeds}
        cache.put("turns", key, stored)
    else:
        _measure(contestants, options, cache, clock, measured_until)
    options = replace(options, seeds=stored["seeds"])
    tested = replace(options, first=stored["bytes"]) if contestants[0].task.data.running_text else options
    anchor, date = still_in(contestants)[0].name, time.strftime("%Y-%m-%d")
    by_name = {item.name: item for item in still_in(contestants)}
    for name, seed, done in stored["runs"]:
        if name in by_name:
            contestant = by_name[name]
            anchored = {"anchor": anchor, "anchor_value": stored["speeds"].get(anchor)}
            contestant.note(training={"seconds": stored["speeds"][name], **anchored, "date": date})
            with guarded(contestant, f"seed {seed}"):
                _test(contestant, tested, cache, clock, done, seed, name == anchor)
    return options


def _flops(contestant: Contestant) -> float | None:
    """Return the FLOPs of a training step; None if they cannot be estimated."""
    with suppress(Exception):
        settings = contestant.base.settings()
        return float(estimate(contestant.config, length=settings.length, batch=settings.batch_size).flops_step)
    return None


def _steps(contestants: Sequence[Contestant], options: CompareOptions) -> dict[str, int]:
    """Return the steps of a run by contestant."""
    left = still_in(contestants)
    if not left:
        raise KinformerError(f"no member can be trained: {contestants[0].name} {contestants[0].error}")
    if options.minutes is not None:
        return {contestant.name: max(1, round(60 * options.minutes / _step_seconds(contestant))) for contestant in left}
    steps = options.steps or DEFAULT_STEPS
    if options.tokens is not None:
        steps = max(1, round(options.tokens / (options.row_length * (options.batch_size or 1))))
    return {contestant.name: steps for contestant in left}


def _step_seconds(contestant: Contestant) -> float:
    """Return the measured seconds of a contestant's training step."""
    training = contestant.record.training
    assert training is not None
    return training["seconds"]


def _test(
    contestant: Contestant, options: CompareOptions, cache: Cache, clock: Clock, done: RunResult, seed: int, first: bool
) -> None:
    """Measure a run on the test split, and record it; ``first``: with the baselines."""
    metric, number, record = contestant.task.metrics[0], seed - options.seed, contestant.record
    with clock("measuring"):
        tested = measured(contestant, options, cache, done, number == 0, first and number == 0)
    contestant.measured.append(tested)
    test = tested["figures"][metric.name]
    seed_run = SeedRun(
        seed=seed,
        test=test,
        test_metrics=tested["figures"],
        steps=done["steps"],
        seconds=done["seconds"],
        curve=curve(done, metric, record.flops_step),
        contexts=tested["contexts"],
        command=done["command"],
    )
    contestant.note(runs=(*record.runs, seed_run))
    note(f"{contestant.name}, seed {seed}: test {metric.text(test)}")


def _measure(
    contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, clock: Clock, end: float = inf
) -> None:
    """Measure what does not depend on trained weights, speeds in turns and memory, until ``end``."""

    def speeds() -> None:
        length_speeds(contestants, options, cache, end)
        generation_speeds(contestants, options, cache, end)

    def memory() -> None:
        before, last = time.monotonic(), 0.0
        for number, contestant in enumerate(left := still_in(contestants)):
            before, last = time.monotonic(), time.monotonic() - before
            if time.monotonic() + last > end:
                names = ", ".join(item.name for item in left[number:])
                note(f"memory is not measured, because `total_minutes` does not suffice: {names}.")
                break
            with guarded(contestant, "measuring memory"):
                contestant.note(memory=memory_of(contestant, options, cache))

    with clock("measuring"):
        for work in (memory, speeds) if options.for_ == "memory" else (speeds, memory):
            work()


def _record(contestant: Contestant, where: MachineFacts) -> EntrantRecord:
    """Return the complete record of a contestant; ``where`` describes the machine of the measurements."""
    base, record = contestant.base, contestant.record
    more = {"lr": record.lr, "own": dict(base.task_options), "recipe": base.recipe}
    settings = {name: value for name, value in vars(base.settings()).items() if name != "seed"} | more
    return record.replace(parameters=contestant.parameters, error=contestant.error, machine=where, settings=settings)


# The report of a comparison, from members or from files of comparisons, as JSON, Markdown and one HTML page.

JSON, MARKDOWN, HTML = "comparison.json", "comparison.md", "comparison.html"
MERGED = "merged"
"""The default folder of a merged report."""


@dataclass(frozen=True)
class Written:
    """A comparison, the ``paths`` of its files, and the printed ``text``."""

    comparison: Comparison
    paths: tuple[Path, ...]
    text: tuple[str | TextTable, ...]


def report(
    members: Sequence[str], options: CompareOptions, merge: Sequence[str], command: str, started_at: float | None = None
) -> Written:
    """Compare ``members``, or merge the files ``merge`` and further files in ``members``, and write the report, which
    shows ``command``, into the folder ``options.out``. The total minutes count from ``started_at``."""
    out, files = Path(options.out), list[Path]()
    if merge:
        files = [Path(path) for path in (*merge, *members)]
        comparison = merged([(path, read(path)) for path in files])
        out = Path(MERGED) if options.out == CompareOptions.out else out
    else:
        comparison = compare(*planned(members, options), command, started_at)
    with reading(" ".join(map(str, files))) if merge else nullcontext():
        return write(comparison, out)


def write(comparison: Comparison, folder: Path) -> Written:
    """Write the report in all forms into ``folder``. The page needs matplotlib and Jinja2; a note may replace it."""
    folder.mkdir(parents=True, exist_ok=True)
    save(comparison, folder / JSON)
    _text_file(folder / MARKDOWN, markdown(comparison))
    paths, notes = [folder / JSON, folder / MARKDOWN], []
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        notes.append(f"no page: it needs {' and '.join(missing)}, which pip install 'kinformer[plot]' gets.")
    else:
        _text_file(folder / HTML, page(comparison))
        paths.insert(0, folder / HTML)
    shown = columns(comparison)
    rows = [(entrant.name, *(column.cell(entrant) for column in shown)) for entrant in ordered(comparison)]
    table = TextTable(("member", *(column.title for column in shown)), rows, range(1, 20))
    lines = [*words.summary(comparison), *words.crossovers_of(comparison), *departures(comparison), "", *notes]
    lines += [f"wrote {path}" for path in paths]
    return Written(comparison, tuple(paths), (table, "", *lines))


def _text_file(path: Path, text: str) -> None:
    write_atomic(path, lambda target: target.write_text(text, encoding="utf-8", errors="backslashreplace"))
