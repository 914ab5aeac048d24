"""The stages of a run, and the learning rate: its schedule over the steps of a stage, its reductions at plateaus.

The schedule is a function of the step alone: a linear rise, then a cosine (Loshchilov and Hutter 2017), a line (Devlin
et al. 2018), a fall with the inverse square root of the step (Vaswani et al. 2017, section 5.3), or nothing. A plateau
lowers the learning rate when validations stop improving, as torch.optim.lr_scheduler.ReduceLROnPlateau does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kinformer.lab.training.logging import Metric
from kinformer.lab.training.settings import PARTS_OF_A_RUN, Settings
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.parsing import JsonObject

# Training in stages: rows, batch, learning rate and settings of the model without weights, changed in the course of a
# run (Beltagy et al. 2020, Longformer, section 4.2; Press et al. 2021, Shortformer). Free of PyTorch.
#
# Every stage reads its rows from the start, in its own order, and does not carry a state over from the stage before.


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` (from 0) of ``count``: the updates from step ``begin`` up to ``end``, None in the last one.

    settings: the settings of the run, with the changes of the stage.
    changes: overrides of the model's config.
    rates: the first step and the end of the schedule of the learning rate; None is the run's end.
    since: the first step with these changes of the model. Metrics from this step on are comparable.
    """

    number: int
    count: int
    begin: int
    end: int | None
    settings: Settings
    changes: Mapping[str, object]
    rates: tuple[int, int | None]
    since: int

    def __str__(self) -> str:
        sizes = f"length {self.settings.length}, batch_size {self.settings.batch_size}, lr {self.settings.lr:g}"
        changes = "".join(f", {path}={value}" for path, value in self.changes.items())
        end = "" if self.end is None else f" to {self.end}"
        return f"stage {self.number + 1} of {self.count}, from step {self.begin + 1}{end}: {sizes}{changes}"

    @property
    def record(self) -> dict[str, float]:
        """Return the log's record of the beginning of the stage."""
        sizes = {f"stage_{name}": getattr(self.settings, name) for name in ("length", "batch_size", "lr")}
        return {"stage": self.number + 1, **sizes}


def stages_of(settings: Settings) -> list[Stage]:
    """Return the stages of a run with ``settings``; a run without any is one stage."""
    entries: Sequence[JsonObject] = settings.stages or ({},)
    begins = [sum(entry["steps"] for entry in entries[:number]) for number in range(len(entries))]
    if settings.steps is not None and len(entries) > 1 and begins[-1] >= settings.steps:
        begun = plural(begins[-1], "step")
        raise KinformerError(
            f"`stages`: those before the last take {begun}, but the run has {settings.steps}; give more `steps`, or "
            "shorter stages (`stages` [] for none)."
        )
    rises = [number for number, entry in enumerate(entries) if number == 0 or "lr" in entry]
    since = 0
    stages: list[Stage] = []
    for number, entry in enumerate(entries):
        changes: Mapping[str, object] = entry.get("set", {})
        if number and changes != stages[-1].changes:
            since = begins[number]
        rise = max(item for item in rises if item <= number)
        fall = next((item for item in rises if item > number), None)
        sizes = {name: value for name, value in entry.items() if name in ("length", "batch_size", "accumulate")}
        rates = {name: value for name, value in entries[rise].items() if name in ("lr", "warmup")}
        end = begins[number + 1] if number + 1 < len(entries) else None
        span = begins[rise], None if fall is None else begins[fall]
        changed = replace(settings, **sizes, **rates)
        stages.append(Stage(number, len(entries), begins[number], end, changed, changes, span, since))
    return stages


def stage_at(settings: Settings, step: int) -> Stage:
    """Return the stage that makes the update after step ``step``."""
    return [stage for stage in stages_of(settings) if stage.begin <= step][-1]


THRESHOLD = 1e-4
"""The relative improvement from which on a validation counts as better."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of the learning rate: a linear rise to ``peak`` over ``warmup`` steps (a share of ``steps`` if below
    1), then a course by ``kind``.

    ``cosine`` and ``linear`` end with ``floor * peak`` at the last of ``steps``. ``inverse-sqrt`` is peak *
    sqrt(warmup / step), not below ``floor * peak``. ``constant`` and ``plateau`` stay at ``peak``; a
    :class:`Plateau` then lowers the learning rate.
    """

    peak: float
    floor: float
    warmup: float
    steps: int
    kind: str = "cosine"

    def __call__(self, step: float) -> float:
        """Return the learning rate of update number ``step``, counted from 0."""
        rise = round(self.warmup * self.steps) if self.warmup < 1 else round(self.warmup)
        if step < rise:
            return self.peak * (step + 1) / (rise + 1)
        if self.kind in ("constant", "plateau"):
            return self.peak
        if self.kind == "inverse-sqrt":
            # peak sqrt(warmup / step), which is ``peak`` where the rise ends
            return self.peak * max(self.floor, ((rise + 1) / (step + 1)) ** 0.5)
        done = min(1.0, (step - rise) / max(1, self.steps - 1 - rise))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.floor + (1 - self.floor) * left)


@dataclass
class Plateau:
    """The learning rate as a share of its schedule, reduced at every plateau of the validations.

    A validation counts as better if it passes the best by a relative ``THRESHOLD``. After more than ``patience``
    validations in a row without a better one, the share is multiplied by ``factor``, down to ``floor``, and counting
    starts again. ``best``: the best metric, None before the first. ``bad``: how many validations in a row were not
    better. ``lower``: whether a lower metric is better.
    """

    factor: float
    patience: int
    floor: float
    lower: bool
    share: float = 1.0
    best: float | None = None
    bad: int = 0

    def see(self, value: float) -> bool:
        """Take the metric of a validation; return whether the learning rate falls."""
        # As in PyTorch: relative to the best, whatever its sign.
        limit = None if self.best is None else self.best * (1 - THRESHOLD if self.lower else 1 + THRESHOLD)
        if math.isfinite(value) and (limit is None or (value < limit if self.lower else value > limit)):
            self.best, self.bad = value, 0
            return False
        self.bad += 1
        if self.bad <= self.patience:
            return False
        before, self.share, self.bad = self.share, max(self.share * self.factor, self.floor), 0
        return self.share < before

    @property
    def state(self) -> dict[str, float | None]:
        """Return the numbers of the plateau for a checkpoint."""
        return {"share": self.share, "best": self.best, "bad": self.bad}

    def load(self, state: JsonObject, comparable: bool = True) -> None:
        """Continue from :attr:`state`. Unless later metrics are ``comparable``, the best is forgotten."""
        self.share = float(state["share"])
        if comparable:
            self.best, self.bad = state["best"], int(state["bad"])


class LearningRate:
    """The learning rate in ``stage``, from step ``step`` on; ``numbers`` come from the checkpoint of that step. With
    the schedule ``plateau`` it follows ``metric``. A new schedule begins at the full rate; a changed model forgets the
    best."""

    def __init__(self, settings: Settings, stage: Stage, metric: Metric, numbers: JsonObject, step: int) -> None:
        self.settings, self.span, self.metric = settings, stage.rates, metric
        self.plateau: Plateau | None = None
        if settings.schedule == "plateau":
            limits = (settings.plateau_factor, settings.plateau_patience, settings.min_lr_ratio)
            self.plateau = Plateau(*limits, metric.lower_is_better)
            if "plateau" in numbers and step > stage.rates[0]:
                self.plateau.load(numbers["plateau"], comparable=step > stage.since)

    def __call__(self, at: float, total: int) -> float:
        """Return the learning rate of the update at step ``at`` of a run of ``total`` steps."""
        settings, (begin, end) = self.settings, self.span
        steps = (total if end is None else end) - begin
        rate = Schedule(settings.lr, settings.min_lr_ratio, settings.warmup, steps, settings.schedule)(at - begin)
        return rate * self.plateau.share if self.plateau else rate

    def falls(self, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of a validation; return whether the rate falls by them."""
        return self.plateau is not None and self.plateau.see(metrics[self.metric.name])

    @property
    def state(self) -> dict[str, object]:
        """Return the state of the learning rate, for the numbers of a checkpoint."""
        return {"plateau": self.plateau.state} if self.plateau else {}


# The pace of a run of limited time: how many steps fit in it, estimated from trial steps and then from real steps.

PROBES, ENOUGH = 20, 10
LOOKS = 100
VALIDATION_SHARE = 0.05
PROBE_SHARE = 0.01
FORWARD_SHARE = 0.4
"""The time of a forward without a backward, as a share of the time of a training step."""
EXIT = 0.8
"""Seconds that a process takes to end."""


def seconds_per_step(step: Callable[[int], object], limit: float, clock: Callable[[], float]) -> float:
    """Return the mean time of the later half of at most ``PROBES`` steps.

    A first step, which is not counted, warms up. If it takes more than ``ENOUGH`` times ``limit``, no further step is
    made, and its time is returned. The mean, not the median, counts: rows of different lengths take different times,
    and a run takes their sum.

    step: makes the step of a number and returns when it is over.
    limit: seconds after which no further step begins, from the third on.
    clock: returns seconds, the same in all processes, so that they make as many steps.
    """
    started_at = clock()
    step(0)
    marks = [clock()]
    if 0 < ENOUGH * limit < marks[0] - started_at:
        return marks[0] - started_at
    while len(marks) < 3 or (len(marks) <= PROBES and marks[-1] - marks[0] < limit):
        step(len(marks))
        marks.append(clock())
    later = marks[(len(marks) - 1) // 2 :]
    return (later[-1] - later[0]) / (len(later) - 1)


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """Return how many seconds ``work`` takes with ``arguments``."""
    started_at = time.monotonic()
    work(*arguments)
    return time.monotonic() - started_at


@dataclass
class Course:
    """The course of a run: how many steps it has in all, and how far it is. After a new estimate of ``total`` the
    learning rate continues from its present value, and the rest of its course is spread over the remaining steps.
    ``since`` is the step of the last estimate, ``share`` the share of the course that was done then."""

    total: int
    since: int = 0
    share: float = 0.0

    def at(self, step: int) -> float:
        """Return where update number ``step`` would stand had ``total`` been known from the start."""
        left = max(1, self.total - self.since)
        return self.share * self.total + (1 - self.share) * self.total * (step - self.since) / left

    def revise(self, step: int, total: int) -> None:
        """Revise the forecast to ``total`` steps from number ``step`` on."""
        self.share, self.since, self.total = self.at(step) / self.total, step, total


@dataclass
class Pace:
    """The times of a run of limited time, by kind of work.

    per_step: seconds of a step. validation, checkpoint: seconds of one. every: steps from one validation to the next,
    and from one checkpoint to the next; 0 for the last only. aside: seconds spent on anything but steps.
    """

    per_step: float
    validation: float = 0.0
    checkpoint: float = 0.0
    every: tuple[int, int] = (0, 0)
    aside: float = 0.0
    _mark: tuple[int, float] | None = field(default=None, repr=False)

    @property
    def end(self) -> float:
        """Return the seconds from the last step to the end of the process."""
        return self.validation + self.checkpoint + EXIT

    def steps(self, seconds: float) -> int:
        """Return how many steps fit in ``seconds``, with the validations and checkpoints between them and the end."""
        costs = zip((self.validation, self.checkpoint), self.every, strict=True)
        per_step = self.per_step + sum(cost / every for cost, every in costs if every)
        return max(0, math.floor((seconds - self.end) / per_step))

    def validations(self, seconds: float) -> int:
        """Return how many validations are made in ``seconds`` of training: few where they take much of it."""
        return min(PARTS_OF_A_RUN, max(1, int(VALIDATION_SHARE * seconds / max(self.validation, 1e-9))))

    def spent(self, validation: float, checkpoint: float, written: float = 0.0) -> None:
        """Record the time of a validation and a checkpoint between two steps, 0 for none; ``written``: of a checkpoint
        written beside training, since the run waits for its last checkpoint."""
        self.aside += validation + checkpoint
        self.validation = validation or self.validation
        self.checkpoint = max(checkpoint, written) or self.checkpoint

    def look(self, step: int, now: float) -> None:
        """Update the time of a step from the steps since the last look."""
        if self._mark and step > self._mark[0]:
            recent = (now - self.aside - self._mark[1]) / (step - self._mark[0])
            self.per_step = (self.per_step + recent) / 2
        self._mark = (step, now - self.aside)
