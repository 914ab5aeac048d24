"""The pace of a run of limited time: how many steps fit in it, estimated from a few trial steps and then from real
ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kinformer.training.settings import PARTS_OF_A_RUN

PROBES, ENOUGH = 20, 10
LOOKS = 100
VALIDATION_SHARE = 0.05
PROBE_SHARE = 0.01
FORWARD_SHARE = 0.4
"""The time of a batch that is only read, as a share of a training step's."""
EXIT = 0.8
"""Seconds that a process takes to end."""


def seconds_per_step(step: Callable[[int], object], limit: float, clock: Callable[[], float]) -> float:
    """Return the mean time of the later half of at most ``PROBES`` steps, after one more of any length; where that one
    took ``ENOUGH`` times the limit, it is the only one, and its time the answer.

    It is a mean because rows of different lengths take different times, and a run takes their sum.

    step: makes the step of a number and returns when it is over.
    limit: seconds after which no further step is tried, from the third on.
    clock: gives seconds; with several processes the same to all, so that they try as many.
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
    """The course of a run: how many steps it has in all, and how far it is.

    Where ``total`` is re-estimated, the learning rate goes on from where it is, and the rest of its course is spread
    over the steps that are left: ``since`` is the step of the last estimate, ``share`` how far the run was then.
    """

    total: int
    since: int = 0
    share: float = 0.0

    def at(self, step: int) -> float:
        """Return where update number ``step`` would stand had ``total`` been known from the start; ``step`` itself
        where it was."""
        left = max(1, self.total - self.since)
        return self.share * self.total + (1 - self.share) * self.total * (step - self.since) / left

    def revise(self, step: int, total: int) -> None:
        """Revise the forecast to ``total`` steps from number ``step`` on."""
        self.share, self.since, self.total = self.at(step) / self.total, step, total


@dataclass
class Pace:
    """The times of a run of limited time, by what took them.

    per_step: seconds of a step. validation, checkpoint: seconds of one. every: steps from one validation to the next,
    and from one checkpoint to the next; 0 where there is none but the last. aside: seconds spent on anything but steps.
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
        """Return how many steps can be made in ``seconds``, with the validations and
        checkpoints between them and the end."""
        costs = zip((self.validation, self.checkpoint), self.every, strict=True)
        per_step = self.per_step + sum(cost / every for cost, every in costs if every)
        return max(0, math.floor((seconds - self.end) / per_step))

    def validations(self, seconds: float) -> int:
        """Return how many validations are made in ``seconds`` of training: as many as parts
        of a run, where they take little of it."""
        return min(PARTS_OF_A_RUN, max(1, int(VALIDATION_SHARE * seconds / max(self.validation, 1e-9))))

    def spent(self, validation: float, checkpoint: float, written: float = 0.0) -> None:
        """Record the time of a validation and a checkpoint between two steps; 0 for one that was not made. A checkpoint
        ``written`` beside training took longer, which the last one is waited for."""
        self.aside += validation + checkpoint
        self.validation = validation or self.validation
        self.checkpoint = max(checkpoint, written) or self.checkpoint

    def look(self, step: int, now: float) -> None:
        """Update the time of a step from the steps since the last look."""
        if self._mark and step > self._mark[0]:
            recent = (now - self.aside - self._mark[1]) / (step - self._mark[0])
            self.per_step = (self.per_step + recent) / 2
        self._mark = (step, now - self.aside)

    def next_look(self, step: int, total: int) -> int:
        """Return the step after which to look again: a tenth of the rest, but at most ``LOOKS`` times evenly spread."""
        return step + max(1, (total - step) // 10, total // LOOKS)
