"""The pace of a run, on a clock that moves only when a step is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kinformer.data import Corpus
from kinformer.training.loop import Trainer
from kinformer.training.pace import PROBES, seconds_per_step
from tests.training.tiny import trainer


class Clock:
    """Makes steps that take ``costs`` seconds each, the last of them for ever; tells the time like the module time."""

    def __init__(self, *costs: float) -> None:
        self.costs, self.now, self.steps = costs, 1000.0, list[int]()

    def step(self, number: int) -> None:
        self.now += self.costs[min(len(self.steps), len(self.costs) - 1)]
        self.steps.append(number)

    def monotonic(self) -> float:
        return self.now


def pace(clock: Clock, limit: float) -> float:
    return seconds_per_step(clock.step, limit, clock.monotonic)


@pytest.mark.parametrize("warm_up", [(1.0,), (60.0,), (60.0, 9.0, 9.0, 4.0)])
def test_first_steps_do_not_count(warm_up: tuple[float, ...]) -> None:
    clock = Clock(*warm_up, 1.0)
    assert pace(clock, 1e9) == pytest.approx(1.0)
    assert clock.steps == list(range(PROBES + 1))


def test_unlike_steps_count_as_they_come() -> None:
    assert pace(Clock(*[5.0] * 11, *[1.0, 3.0] * 5), 1e9) == pytest.approx(2.0)


@pytest.mark.parametrize(("limit", "steps"), [(0.0, 3), (8.0, 3), (11.5, 7), (1e9, PROBES + 1)])
def test_no_step_begins_after_the_limit(limit: float, steps: int) -> None:
    clock = Clock(60.0, 7.0, 1.0)
    assert pace(clock, limit) == pytest.approx(1.0)
    assert len(clock.steps) == steps


def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch, corpus: Corpus, folder: Path, every: int | None) -> Trainer:
    """A run of ten minutes by ``clock``, whose steps count themselves in a buffer."""
    monkeypatch.setattr("kinformer.training.loop.time", clock)
    run = trainer(corpus, folder, steps=None, minutes=10.0, validate_every=every)
    run.model.register_buffer("made", torch.zeros(()))
    update = run.update

    class Timed:
        forget = update.forget

        def __call__(self, step: int, rate: float, progress: float) -> Any:
            clock.step(step)
            run.model.made += 1
            return update(step, rate, progress)

    run.update = Timed()  # type: ignore[assignment]
    return run


def test_minutes_buy_steps_of_the_later_pace(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(30.0, 6.0, 3.0, 1.0)
    run = timed(clock, monkeypatch, corpus, tmp_path, 0)
    probing = 600 * 0.03
    assert run._affordable_steps() == int(0.97 * (600 - 30 - probing))
    assert clock.now == 1000 + 30 + probing
    assert not run.model.made, "steps that are forgotten leave nothing in a buffer"


@pytest.mark.parametrize("cost", [1.0, 45.0])
def test_validations_are_paid_for_as_often_as_they_come(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    clock = Clock(cost)
    run = timed(clock, monkeypatch, corpus, tmp_path, None)
    steps, validation = run._affordable_steps(), 0.4 * cost * run.data.validations
    left = 0.97 * (600 - (clock.now - 1000))

    def seconds(number: int) -> float:
        return number * cost + min(number, 10) * validation

    assert seconds(steps) <= left < seconds(steps + 1)
