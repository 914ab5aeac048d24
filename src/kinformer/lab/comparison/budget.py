"""A comparison in a limited time: sizes that suit the time, and members that train in turns until the time is over.

In turns, other load on the machine slows all members alike, and all make as many steps. The number of steps follows the
clock: after every round of turns, the rest of the time is divided anew.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kinformer.lab.comparison.options import MEASURED_BYTES, CompareOptions
from kinformer.lab.comparison.plan import (
    Contestant,
    Entrant,
    Sizes,
    base_of,
    first_task,
    guarded,
    sized,
    with_length,
    with_tokenizer,
)
from kinformer.lab.comparison.record import Cache, RunResult, file_name, key_of
from kinformer.lab.comparison.training import command_of, contexts_of, log_of, validated
from kinformer.lab.comparison.words import seconds_of, too_few
from kinformer.lab.data import open_corpus
from kinformer.lab.runs.create import plan as create_run
from kinformer.lab.runs.minutes import Chooser, Ladder, spelled_minutes, with_vocabulary
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.runs.planner import checked, group_of, named_data, open_planner, recipe_config
from kinformer.lab.runs.rows import plan_of, staged_rows
from kinformer.lab.runs.run import writing
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.logging import Log, TrainingProgress
from kinformer.lab.training.loop import Trainer, Window
from kinformer.lab.training.schedule import FORWARD_SHARE, stage_at
from kinformer.runtime.errors import KinformerError, plural

# The sizes and the learning rate.

TRAINED_SHARE = 0.65
"""The share of the total minutes that the choice of sizes expects for steps."""
RATES = ((128, 7e-3), (192, 5e-3), (256, 4e-3), (384, 3e-3), (512, 2.5e-3))
"""Learning rates of Muon by width. At 680 to 850 steps of width 128, 5e-3 or 1e-2 is the best of three rates for every
member measured, and at width 192 it is 5e-3 (minutes_members and minutes_average in ``benchmarks/results``). The rates
of greater widths are not measured: they fall more slowly than the width grows."""
SEED_STEPS, MOST_SEEDS = 3000, 3
"""The steps of a run from which on a further seed is worth more than further steps (a judgement), and the most seeds.
3,000 steps are also the number from which on ``train`` within minutes takes a larger model."""


def rate(contestant: Contestant, options: CompareOptions) -> float:
    """Return the learning rate of a contestant: the user's, or by the width of its model."""
    if options.lr is not None or options.optimizer != "muon":
        return options.middle
    return next((lr for dim, lr in RATES if contestant.config.dim <= dim), RATES[-1][1])


def with_sizes(entrants: Sequence[Entrant], options: CompareOptions, store: Cache) -> tuple[CompareOptions, Sizes]:
    """Return ``options`` with a tokenizer, rows, precision and recipe that suit the minutes, and the sizes of models:
    the choice of training within minutes for the first entrant in its share of the time. The choice is stored."""
    assert options.total_minutes is not None
    task, first = first_task(entrants, options), entrants[0]
    minutes = TRAINED_SHARE * options.total_minutes / len(entrants) / (options.seeds or 1)
    base = replace(base_of(first, options, task), minutes=minutes, recipe=options.recipe)
    if options.train_tokenizer is None:
        spec = named_data(base, task, Path(options.out))
        splits = cache(lambda: open_corpus(spec, holdout=options.holdout).splits)
        options = replace(options, train_tokenizer=with_vocabulary(base, task, splits).train_tokenizer)
    options = with_tokenizer(entrants, options)
    longest = with_length(entrants, options).row_length

    def choose() -> dict[str, Any]:
        requested = replace(base_of(first, options, task), minutes=minutes, recipe=options.recipe)
        device = options.usable_device().type
        recipe = recipe_config(requested, None, None) if options.recipe is None else None
        if options.parameters is not None and recipe is not None:
            widths = sized(recipe, first.changes, options.parameters, first.name)
            requested = replace(requested, set={**widths, **requested.set})
        planner, complete = open_planner(requested)
        kind = Chooser if planner.task.data.running_text else Ladder
        group = group_of(requested.parallelism, device)
        chosen = kind(
            requested, complete, planner.task, lambda trial: checked(planner.plan(trial), planner.task, group), recipe,
            device, time.monotonic(),
        ).choose()  # fmt: skip
        wanted = chosen.options
        names = ("batch_size", "length", "precision", "ema", "recipe")
        dim = None if options.parameters is not None else wanted.set.get("dim")
        sizes = [dim, wanted.weight_decay, chosen.steps]
        return {name: getattr(wanted, name) for name in names} | {"sizes": sizes}

    key = [options.total_minutes, options.seeds, options.parameters, first.spec, dict(first.changes), len(entrants)]
    key += [options.data, options.task, dict(options.task_options), options.tokenizer, options.length, options.recipe]
    chosen = store.once("sizes", key_of([*key, options.batch_size, options.precision, options.ema]), choose)
    dim, weight_decay, steps = chosen.pop("sizes")
    if options.length is None and chosen["length"] is not None:
        chosen["length"] = min(longest, chosen["length"])
    options = replace(options, **{name: value for name, value in chosen.items() if getattr(options, name) is None})
    options = with_length(entrants, replace(options, batch_size=options.batch_size or 8, sweep=0))
    return options, Sizes(dim, weight_decay, steps)


# Training in turns.

ROUND_SHARE, MOST_ROUND = 0.02, 20.0
"""A round of turns takes this share of the time of training, at most ``MOST_ROUND`` seconds."""
PROBES = 3
"""Steps of every member before the plan is told; the first step is not timed."""
VALIDATIONS, VALIDATION_SHARE = 5, 0.05
"""The most validations of a run, and the share of its time that they take, unless the last one alone takes more."""


class TurnTrainer(Trainer):
    """A trainer that makes its steps in turns with other trainers. ``active`` is the time of its steps, and
    ``validated`` the time of its last validation."""

    active = validated = 0.0

    @property
    def seconds(self) -> float:
        return self.active

    def make(self, steps: int) -> float:
        """Make ``steps`` steps, and return the seconds that they took."""
        started_at = time.monotonic()
        self.window.restart()
        for _ in range(steps):
            lr = self.rate(at := self.course.at(self.step), self.total)
            self.window.updates.append(self.update(self.step, lr, at / self.total))
            self.moving.update(self.step)
            self.step += 1
        losses = self.window.read()[0]  # this waits for the device
        seconds = time.monotonic() - started_at
        self.active += seconds
        self.storage.require_finite(self.step - len(losses) + 1, losses, losses)
        if self.log is not None:
            self.log.write(self.step, {"mean_loss": sum(losses) / len(losses), "lr": lr, "seconds": self.active})
        return seconds

    def validate(self) -> None:
        """Validate, and keep the weights if they are the best."""
        started_at = time.monotonic()
        self._validate()
        self.storage.saves.wait()
        self.validated = time.monotonic() - started_at


@dataclass
class Turn:
    """A run of a contestant with one ``seed``: the steps of each of its ``rounds``, with their seconds, and the bytes
    that a token of the data stands for (None for data without running text)."""

    contestant: Contestant
    seed: int
    trainer: TurnTrainer
    options: TrainOptions
    bytes_per_token: float | None
    rounds: list[tuple[int, float]] = field(default_factory=list)

    def make(self, steps: int) -> None:
        """Add a round of ``steps`` steps."""
        self.rounds.append((steps, self.trainer.make(steps)))

    @property
    def per_step(self) -> float:
        """The seconds of a step in the last rounds."""
        steps, seconds = map(sum, zip(*self.rounds[-3:], strict=True))
        return seconds / steps

    @property
    def result(self) -> RunResult:
        """The result of the run, in the form of a run by itself."""
        trainer = self.trainer
        return {
            "folder": trainer.folder.name, "validation": dict(trainer.best.metrics or {}), "steps": trainer.step,
            "seconds": trainer.active, "log": log_of(trainer.folder),
            "command": command_of(replace(self.options, steps=trainer.step)),
        }  # fmt: skip


def open_turn(contestant: Contestant, options: CompareOptions, seed: int, steps: int, end: float) -> Turn:
    """Return a run before its first step, in a new folder; ``steps`` is a forecast. After the time ``end``, by
    ``time.monotonic()``, no run is opened."""
    if time.monotonic() > end:
        raise over(options)
    settings = {"validation_tokens": validated(options, steps), "checkpoint_every": 0}
    assert contestant.record.lr is not None
    trained = contestant.options(Path(options.out), contestant.record.lr, seed, max(1, steps), **settings)
    folder = Path(options.out) / "runs" / f"{file_name(contestant.name)}-{contestant.run_key(trained)}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed comparison
    with writing(folder):
        made = create_run(replace(trained, out=str(folder)), True, time.monotonic())
    run, training = made.run, plan_of(made.run, made.settings)
    data = staged_rows(run, training, stage_at(made.settings, 0), made.device.type)
    torch.manual_seed(made.settings.seed)
    model = made.model()
    objective = run.task.objective(made.settings.objective, model, data)
    trainer = TurnTrainer(model, data, objective, made.settings, folder, Group(made.device), quiet=True)
    trainer.window, trainer.log, trainer.progress = Window(trainer.group), None, TrainingProgress(0, 0, quiet=True)
    split = training.data.splits["train"] if run.task.data.running_text else None
    return Turn(contestant, seed, trainer, trained, split.bytes / max(1, len(split)) if split else None)


TEST_SHARE = 0.12
"""The largest planned share of the total minutes for the test split."""
OPENED, COUNTED, WRITTEN = 1.5, 3.0, 3.0
"""Seconds to open a run, to count the n-grams of a book, and to write the report."""
SLACK, LEAST_BYTES = 1.5, 10_000


class Turns:
    """The runs of a comparison that ends at ``end``, by ``time.monotonic()``: ``done`` are the steps of each run,
    ``aside`` the seconds of other measurements before training, ``share`` the share of the time in which this process
    computes."""

    share = 1.0

    def __init__(self, turns: Sequence[Turn], options: CompareOptions, end: float, aside: float) -> None:
        self.turns, self.options, self.end, self.done, self.aside = list[Turn](), options, end, PROBES, aside
        self.shuffle = random.Random(0).shuffle
        self.add(turns)
        self.most_bytes = self.test_bytes(TEST_SHARE * 60 * (options.total_minutes or 0))

    def add(self, turns: Sequence[Turn]) -> None:
        """Add runs, and let them make as many steps as the others have made."""
        for turn in turns:
            if time.monotonic() > self.end:
                raise over(self.options)
            with guarded(turn.contestant, "its first training steps"):
                turn.make(1)  # slower than all others
                turn.rounds.clear()
                turn.make(PROBES - 1)
        self.turns += turns
        self._leave_failed_out()

    def _leave_failed_out(self) -> None:
        self.turns = [turn for turn in self.turns if turn.contestant.error is None]
        if not self.turns:
            raise KinformerError("no member can be trained; the reasons stand above.")

    @property
    def per_step(self) -> float:
        """The seconds of a step of all runs."""
        return sum(turn.per_step for turn in self.turns)

    @property
    def per_byte(self) -> float:
        """The seconds in which all runs read a byte of the test split; 0 for data without running text."""
        tokens = self.options.row_length * (self.options.batch_size or 1)
        seconds = 0.0
        for turn in self.turns:
            forwards = seconds_of(turn.contestant.record, "forward")
            contexts = [*contexts_of(self.options).values()][: None if turn.seed == self.options.seed else 1]
            for context in contexts if turn.bytes_per_token else ():
                usual = FORWARD_SHARE * turn.per_step / tokens
                longer = [item / length for length, item in forwards.items() if length <= 2 * context]
                seconds += SLACK * max([usual, *longer]) / (turn.bytes_per_token or 1)
        return seconds

    def test_bytes(self, seconds: float) -> int:
        """Return the bytes of the test split that all runs can be measured on in ``seconds``."""
        most = self.options.first or MEASURED_BYTES
        left = seconds - self.overhead
        return max(min(most, LEAST_BYTES), min(most, int(left / self.per_byte))) if self.per_byte else most

    @property
    def after(self) -> float:
        """The expected seconds after the last step: validations, the measurements on the test split, the report."""
        validation = sum(turn.trainer.validated or 2 * turn.per_step for turn in self.turns)
        test = self.most_bytes * self.per_byte or 2 * validation
        return validation + test + self.overhead

    @property
    def overhead(self) -> float:
        """The expected seconds of the test and the report that do not depend on the number of bytes."""
        return (OPENED * len(self.turns) + COUNTED + WRITTEN) / self.share

    @property
    def steps(self) -> int:
        """The steps of a run that the rest of the time allows, with their validations."""
        left = (self.end - time.monotonic() - self.aside - self.after) / (1 + VALIDATION_SHARE)
        return self.done + max(0, int(left / self.per_step))

    @property
    def validations(self) -> int:
        """The number of validations of a run that take ``VALIDATION_SHARE`` of its time, or the last one alone."""
        trainer = self.turns[0].trainer
        seconds = trainer.validated or FORWARD_SHARE * trainer.data.validations * self.turns[0].per_step
        return min(VALIDATIONS, max(1, int(VALIDATION_SHARE * self.steps * self.turns[0].per_step / seconds)))

    def train(self) -> None:
        """Train until the time is over."""
        with ExitStack() as logs:
            for turn in self.turns:
                turn.trainer.log = logs.enter_context(closing(Log(turn.trainer.folder, 0)))
            self._train()

    def _train(self) -> None:
        length, validated, self.aside = min(MOST_ROUND, ROUND_SHARE * max(0.0, self.end - time.monotonic())), 0, 0.0
        while self.done < (total := self.steps):
            for turn in self.turns:
                turn.trainer.course.revise(self.done, total)
            count = min(total - self.done, max(1, int(length / self.per_step)))
            self.shuffle(self.turns)
            self._all(lambda turn, count=count: turn.make(count))  # type: ignore[misc]
            self.done += count
            if (part := self.validations * self.done // total) > validated and self.done < total:
                validated = part
                self._all(lambda turn: turn.trainer.validate())
        self._all(lambda turn: turn.trainer.validate())

    def _all(self, work: Callable[[Turn], object]) -> None:
        for turn in self.turns:
            with guarded(turn.contestant, f"seed {turn.seed}"):
                work(turn)
        self._leave_failed_out()


def over(options: CompareOptions) -> KinformerError:
    """Return the error for total minutes that end before training."""
    return KinformerError(
        f"`total_minutes` {options.total_minutes:g}: is over before the first round of steps; give more minutes or "
        "fewer members, or repeat it when nothing else runs."
    )


def plan_text(turns: Turns) -> list[str]:
    """Return sentences about the plan: the steps of each run, and whether they suffice.

    Errors: ``KinformerError`` if the time is over before training.
    """
    names, options, steps = {turn.contestant.name for turn in turns.turns}, turns.options, turns.steps
    if steps <= PROBES:
        raise over(options)
    runs = plural(len(turns.turns), "run") if len(turns.turns) > len(names) else "one run each"
    tokens = options.row_length * (options.batch_size or 1)
    plan = (
        f"in {spelled_minutes(options.total_minutes or 0)} each member makes about {plural(steps, 'step')} of "
        f"{plural(tokens, 'token')} ({runs}), in turns; the rest of the time is for measuring."
    )
    return [plan, too_few(steps, len(names), options.total_minutes or 0.0)]
