"""A comparison from end to end. Every finished stage is stored, so a killed comparison continues at the next stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from kinformer import __version__
from kinformer.core.config import override
from kinformer.core.model import CausalModel
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.comparison import words
from kinformer.lab.comparison.options import CompareOptions, planned
from kinformer.lab.comparison.plan import (
    Clock,
    Contestant,
    Entrant,
    contestants,
    entrants,
    facts,
    guarded,
    settings_of,
    still_in,
    with_length,
    with_tokenizer,
)
from kinformer.lab.comparison.record import (
    Badge,
    Cache,
    Comparison,
    EntrantRecord,
    MachineFacts,
    SeedRun,
    key_of,
    merged,
    read,
    save,
)
from kinformer.lab.comparison.report import columns, markdown, ordered, page
from kinformer.lab.comparison.speed import generation_speeds, length_speeds, machine, memory_of, training_speeds
from kinformer.lab.comparison.training import SWEEP_SHARE, curve, measured, run, sweep, sweep_steps, validations
from kinformer.lab.comparison.words import departures
from kinformer.lab.comparison.works import reads_tokens
from kinformer.lab.estimation.estimate import estimate
from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.training.settings import DEFAULT_STEPS
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import locked, reading, require_utf8, write_atomic
from kinformer.runtime.progress import note
from kinformer.testing import ENCODER_MODEL_CHECKS, MODEL_CHECKS, EncoderModelSubject, ModelSubject, examine

# The badges of the report: the battery's laws, checked on every contestant.
#
# The laws are checked in float64 on the recipe tiny of the members, with the same changes. The windows and segments of
# tiny are so small that the battery crosses them. Changes that only fit a larger model are left out.

VOCAB = 23
LAWS = {
    "causality": "causal: later tokens change nothing before them",
    "partition": "any partition: however a text is cut, outputs, gradients and states are the same",
    "padding": "padding changes nothing",
    "reset": "a reset begins a new sequence, also in mid-chunk",
    "rows": "rows do not see each other",
    "both_ways": "every token is seen from both sides",
}


def badges(entrant: Entrant) -> list[Badge]:
    """Return a badge for each law; an empty list for a model whose inputs the battery cannot make."""
    config, left_out = tiny(entrant)
    if not reads_tokens(config):
        return []
    subject: object
    if config.protocol is CausalModel:
        subject, every_check = ModelSubject(config.build, VOCAB), MODEL_CHECKS
    else:
        subject, every_check = EncoderModelSubject(config.build, VOCAB, global_tokens=False), ENCODER_MODEL_CHECKS
    checks = {name: check for name, check in every_check.items() if name in LAWS}
    report = examine(checks, subject)
    badges_: list[Badge] = []
    for name in checks:
        failed = report.failed.get(name)
        holds = True if name in report.passed else False if failed is not None else None
        why = str(failed) if failed is not None else ""
        badges_.append({"name": name, "law": LAWS[name], "holds": holds, "why": why, "left_out": left_out})
    return badges_


def tiny(entrant: Entrant) -> tuple[ModelConfig, list[str]]:
    """Return the entrant's config in the recipe tiny, and the changes that do not fit this recipe."""
    config = configure(entrant.member, "tiny")
    if reads_tokens(config):
        config = configure(entrant.member, "tiny", VOCAB)
    config = override(config, entrant.layers("tiny", config), kinds())
    left_out = []
    for path, value in entrant.changes.items():
        changed = None
        with suppress(KinformerError):
            changed = override(config, {path: value}, kinds())
        if changed is None or path == "layers" or path == "dim":
            left_out.append(path)
        else:
            config = changed
    return config, left_out


EVALUATION_SHARE, FIXED_SECONDS = 0.25, 12.0
"""The share of the total minutes for measuring, and the seconds of each member that the total minutes do not change."""
VALIDATED = 1.15
"""The time of a step with its share of validations and checkpoints, relative to the step alone."""


@seeding
def compare(members: Sequence[str], options: CompareOptions, command: str) -> Comparison:
    """Train and measure ``members`` by ``options``.

    A member that fails is out, with a reason, and the other members continue. The report shows ``command``.

    Errors: ``KinformerError`` for a mistake that concerns all members.
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
                sheet = facts(contestant.entrant, contestant.config)
                contestant.note(facts=sheet, state_bytes=sheet["state_bytes"], flops_step=_flops(contestant))
        with clock("training speed"):
            training_speeds(contestants_, options, cache)
        steps = _steps(contestants_, options, cache, time.monotonic() - started_at)
        for contestant in still_in(contestants_):
            seconds, count = _step_seconds(contestant), steps[contestant.name]
            trials = options.sweep * sweep_steps(options, count)
            total = seconds * (count * options.seeds + trials)
            note(
                f"{contestant.name}: {plural(contestant.parameters, 'parameter')}, {options.seeds} x "
                f"{plural(count, 'step')} and {trials} of the sweep, about {total / 60:.1f} minutes"
            )
        for contestant in still_in(contestants_):
            with clock("sweeps"), guarded(contestant, "the sweep"):
                sweep(contestant, options, cache, steps[contestant.name], metric)
        for number in range(options.seeds):  # all contestants have one run before any contestant has two
            for contestant in still_in(contestants_):
                with guarded(contestant, f"seed {options.seed + number}"):
                    baseline = contestant is contestants_[0]
                    _one_seed(contestant, options, cache, clock, steps[contestant.name], number, baseline)
        _measure(contestants_, options, cache, clock)
    where, first = machine(str(options.usable_device())), contestants_[0]
    tested = [item for contestant in contestants_ for item in contestant.measured]
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
            "parameters": options.parameters or next((item.parameters for item in contestants_ if item.parameters), 0),
            "steps": sorted(set(steps.values())),
            "minutes": options.minutes,
            "total_minutes": options.total_minutes,
            "tokens_step": options.row_length * options.batch_size,
            "seeds": options.seeds,
            "sweep_steps": sorted({sweep_steps(options, count) for count in steps.values()}),
        },
        settings=settings_of(first.base.settings()),
        seconds={stage: round(seconds, 2) for stage, seconds in clock.seconds.items()},
        entrants=tuple(_record(contestant, where) for contestant in contestants_),
    )


def _flops(contestant: Contestant) -> float | None:
    """Return the FLOPs of a training step; None if they cannot be estimated."""
    base = contestant.base
    with suppress(Exception):
        settings = base.settings()
        estimated = estimate(contestant.config, length=settings.length, batch=settings.batch_size)
        return float(estimated.flops_step)
    return None


def _steps(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, spent: float) -> dict[str, int]:
    """Return the steps of a run by contestant.

    Steps that depend on measured speeds are stored, so a killed comparison continues with the same steps.
    """
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
    """Return the measured seconds of a contestant's training step."""
    training = contestant.record.training
    assert training is not None
    return training["seconds"]


def _steps_in(left: Sequence[Contestant], options: CompareOptions, spent: float) -> int:
    """Return the steps per run that leave ``EVALUATION_SHARE`` of the total time for measuring."""
    assert options.total_minutes is not None
    seconds = (1 - EVALUATION_SHARE) * 60 * options.total_minutes - spent - FIXED_SECONDS * len(left)
    seconds_of_all = sum(_step_seconds(contestant) for contestant in left)
    # A best learning rate at an end of the sweep costs one more trial.
    tried = (options.sweep + 1 if options.sweep else 0) / SWEEP_SHARE
    steps = int(seconds / (seconds_of_all * VALIDATED * (options.seeds + tried)))
    if steps < 20:
        raise KinformerError(
            f"`total_minutes` {options.total_minutes:g}: suffices for {plural(max(0, steps), 'step')} a run; give more "
            "minutes, or fewer members, seeds or `parameters`."
        )
    return steps


def _one_seed(
    contestant: Contestant, options: CompareOptions, cache: Cache, clock: Clock, steps: int, number: int, baseline: bool
) -> None:
    seed, metric = options.seed + number, contestant.task.metrics[0]
    with clock("training"):
        lr, settings = contestant.record.lr, validations(options, steps)
        assert lr is not None
        done = run(contestant, options, cache, lr, seed, steps, keeps=True, **settings)
    if "diverged" in done:
        raise KinformerError(done["diverged"])
    with clock("measuring"):
        tested = measured(contestant, options, cache, done, number == 0, baseline and number == 0)
    contestant.measured.append(tested)
    value, record = tested["figures"][metric.name], contestant.record
    seed_run = SeedRun(
        seed=seed,
        value=value,
        figures=tested["figures"],
        steps=done["steps"],
        seconds=done["seconds"],
        curve=curve(done, metric, record.flops_step),
        contexts=tested["contexts"],
        command=done["command"],
    )
    contestant.note(runs=(*record.runs, seed_run))
    note(f"{contestant.name}, seed {seed}: {metric.text(value)}")


def _measure(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache, clock: Clock) -> None:
    """Measure the properties that do not depend on trained weights: speeds in turns, memory, and the battery's laws."""
    with clock("measuring"):
        generation_speeds(contestants, options, cache)
        length_speeds(contestants, options, cache)
    for contestant in still_in(contestants):
        with clock("measuring"), guarded(contestant, "measuring memory"):
            contestant.note(memory=memory_of(contestant, options, cache))
        with clock("battery"), guarded(contestant, "the battery"):
            key = key_of([__version__, torch.__version__, contestant.entrant.parts, dict(contestant.entrant.changes)])
            contestant.note(badges=cache.once("badges", key, partial(badges, contestant.entrant)))


def _record(contestant: Contestant, where: MachineFacts) -> EntrantRecord:
    """Return the complete record of a contestant; ``where`` describes the machine of the measurements."""
    base, record = contestant.base, contestant.record
    settings = settings_of(base.settings()) | {
        "lr": record.lr, "own": dict(base.task_options), "recipe": base.recipe,
    }  # fmt: skip
    return record.replace(
        parameters=contestant.parameters,
        error=contestant.error,
        machine=where,
        settings={name: value for name, value in settings.items() if name != "seed"},
    )


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


def report(members: Sequence[str], options: CompareOptions, merge: Sequence[str], command: str) -> Written:
    """Compare ``members``, or merge the files ``merge`` and further files in ``members``, and write the report.

    The report is in the folder ``options.out`` and shows ``command``.
    """
    out, files = Path(options.out), list[Path]()
    if merge:
        files = [Path(path) for path in (*merge, *members)]
        comparison = merged([(path, read(path)) for path in files])
        out = Path(MERGED) if options.out == CompareOptions.out else out
    else:
        comparison = compare(*planned(members, options), command)
    with reading(" ".join(map(str, files))) if merge else nullcontext():
        return write(comparison, out)


def write(comparison: Comparison, folder: Path) -> Written:
    """Write the report in all forms into ``folder``.

    The page needs matplotlib and Jinja2. Without these packages a note replaces the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save(comparison, folder / JSON)
    _text_file(folder / MARKDOWN, markdown(comparison))
    paths, notes = [folder / JSON, folder / MARKDOWN], []
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        notes.append(f"no page: it needs {' and '.join(missing)}, which pip install 'kinformer[plot]' gets.")
    else:
        _text_file(folder / HTML, page(comparison))
        paths.insert(0, folder / HTML)
    table = TextTable(
        ("member", *(column.title for column in columns(comparison))),
        [(entrant.name, *(column.cell(entrant) for column in columns(comparison))) for entrant in ordered(comparison)],
        range(1, 20),
    )
    lines = [
        *words.summary(comparison),
        *words.crossovers_of(comparison),
        *departures(comparison),
        "",
        *notes,
        *(f"wrote {path}" for path in paths),
    ]
    return Written(comparison, tuple(paths), (table, "", *lines))


def _text_file(path: Path, text: str) -> None:
    write_atomic(path, lambda target: target.write_text(text, encoding="utf-8", errors="backslashreplace"))
