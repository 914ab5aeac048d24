"""The pace of a run, on a clock that moves only when a step is made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kinformer.lab.data import Corpus
from kinformer.lab.training.loop import Result, UpdateResult
from kinformer.lab.training.schedule import PROBES, Course, seconds_per_step
from kinformer.lab.training.settings import Settings
from tests.training.tiny import train, trainer


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


class Life(NamedTuple):
    """What came of a run by a clock."""

    result: Result
    rates: list[float]
    ended: float


def live(clock: Clock, monkeypatch: pytest.MonkeyPatch, corpus: Corpus, folder: Path, **changes: Any) -> Life:
    """A run of ten minutes in which nothing but steps (by ``clock``) and validations (20 s) takes time."""
    monkeypatch.setattr("kinformer.lab.training.loop.time", clock)
    monkeypatch.setattr("kinformer.lab.training.loop.time", clock)
    monkeypatch.setattr("kinformer.lab.training.schedule.time", clock)
    run = trainer(corpus, folder, steps=None, minutes=10.0, **{"checkpoint_every": 0, "validate_every": 0} | changes)
    update, rates = run.update, list[float]()
    done = UpdateResult(torch.tensor(1.0), torch.tensor(1.0), torch.ones(1), 64)

    class Timed:
        forget, optimiser, carried = update.forget, update.optimiser, update.carried

        def seconds_per_step(self, limit: float) -> float:
            return seconds_per_step(clock.step, limit, clock.monotonic)

        def __call__(self, step: int, rate: float, progress: float) -> UpdateResult:
            clock.step(step)
            rates.append(rate)
            return done

    def validate(*_: Any) -> dict[str, float]:
        clock.now += 20
        return {"nats": 1.0}

    run.update = Timed()  # type: ignore[assignment]
    monkeypatch.setattr("kinformer.lab.training.loop.validate", validate)
    return Life(run.run(), rates, clock.now - 1000)


@pytest.mark.parametrize(
    "paces",
    [(1.0,), (30.0, 6.0, 3.0, 1.0), (*[2.0] * 150, 1.0), (*[1.0] * 300, 2.5), (*[3.0, 1.0, 1.0] * 150, 2.0)],
    ids=["even", "slow-start", "faster", "slower", "uneven"],
)
def test_minutes_are_kept_and_the_rate_gets_down(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paces: tuple[float, ...]
) -> None:
    life = live(Clock(*paces), monkeypatch, corpus, tmp_path, min_lr_ratio=0.0, lr=1.0)
    assert 0.97 * 600 <= life.ended <= 1.01 * 600
    assert life.result.steps == life.result.total == len(life.rates)
    assert life.rates[-1] < 0.01
    top = life.rates.index(max(life.rates))
    assert life.rates[top:] == sorted(life.rates[top:], reverse=True)


def test_validations_are_paid_for(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = live(Clock(1.0), monkeypatch, corpus, tmp_path, validate_every=50)
    assert 0.97 * 600 <= life.ended <= 1.01 * 600
    assert 380 < life.result.steps < 450


def test_a_short_run_validates_seldom(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations of the usual number would take longer than the training; they take 5 % of it, or one is made."""
    life = live(Clock(60.0), monkeypatch, corpus, tmp_path, validate_every=None)
    assert life.result.best_step == life.result.steps


def test_steps_given_at_once_are_taken_as_they_come() -> None:
    course = Course(100)
    assert [course.at(step) for step in range(100)] == list(range(100))
    course.revise(50, 200)
    assert course.at(50) == 100 and course.at(200) == 200 and 100 < course.at(51) < 101


def test_a_run_of_minutes_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    options = {"steps": None, "minutes": 0.03, "checkpoint_every": None}
    result = train(corpus, tmp_path, **options)
    assert result.seconds < 10
    again = trainer(corpus, tmp_path, **options)
    assert again.total == result.total and again.course.share > 0
    assert trainer(corpus, tmp_path, steps=again.step + 5).total == again.step + 5


def test_a_first_step_that_takes_much_of_the_time_is_the_only_one_tried() -> None:
    clock = Clock(60.0, 7.0, 1.0)
    assert pace(clock, 2.4) == 60.0 and clock.steps == [0]


def test_more_minutes_buy_a_step_however_slow_the_start_is(corpus: Corpus, tmp_path: Path) -> None:
    options = {"steps": None, "checkpoint_every": None}
    trainer(corpus, tmp_path, minutes=0.03, **options, started_at=time.monotonic() - 100).run()
    slow = trainer(corpus, tmp_path, minutes=3.0, **options, started_at=time.monotonic() - 175)
    assert slow.step == 1 and 90 < slow.spent < 110 and slow.step_seconds < 1
    assert slow.run().steps == 2
    last = trainer(corpus, tmp_path, minutes=3.0, **options)
    assert last.run().steps == 2  # the time is over


def test_validations_follow_what_is_trained() -> None:
    settings = Settings(steps=20)
    assert settings.cadences(20, validation=6.4) == (20, 2)
    assert settings.cadences(20, validation=0.2) == (2, 2)
    assert settings.cadences(1000, validation=6.4) == (100, 100)
    assert Settings(steps=20, validate_every=3).cadences(20, validation=6.4) == (3, 2)


def test_a_validation_follows_what_is_trained():
    tokens = [Settings(steps=steps, batch_size=8, length=512).validated() for steps in (20, 100, 200, 1000)]
    assert tokens == [16_384, 25_600, 51_200, 65_536]
    assert Settings(minutes=1.0).validated() == 65_536
