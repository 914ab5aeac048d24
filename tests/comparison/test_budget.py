"""A comparison in total minutes: sizes and rates without a sweep, as many steps for all, by a clock."""

import json
from types import SimpleNamespace

import pytest

from kinformer.lab.cli.main import main
from kinformer.lab.comparison import budget, plan
from kinformer.lab.comparison.budget import Turns, rate
from kinformer.lab.comparison.options import CompareOptions
from kinformer.lab.comparison.record import EntrantRecord, as_json, read

FLAGS = [
    "--quiet", "--recipe", "tiny", "--length", "16", "--batch-size", "2", "--total-minutes", "1", "--rounds", "1",
    "--lengths", "16", "--contexts", "1x,2x", "--first", "400", "--threads", "1", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def whole(tmp_path, text_file, cheap, monkeypatch):
    """The folder and the words of a comparison in total minutes, which suffice for 7 steps on any machine."""
    monkeypatch.setattr(Turns, "steps", property(lambda self: 7))
    monkeypatch.setattr(plan, "LEAST_SHARED", 0.0)
    words = ["compare", "rope", "gla", "--data", str(text_file), *FLAGS, "--out", str(tmp_path)]
    assert main(words) == 0
    return tmp_path, words


def test_all_train_by_as_many_steps_without_a_sweep(whole, monkeypatch):
    folder, words = whole
    made = read(folder / "comparison.json")
    (steps,) = made.budget["steps"]
    assert steps == 7 and made.budget["sweep_steps"] == [] and made.budget["total_minutes"] == 1
    for item in made.entrants:
        assert item.error is None and item.lr == budget.RATES[0][1] and not item.sweep
        assert [run.steps for run in item.runs] == [steps] and item.runs[0].curve[-1].step == steps
        assert item.training["seconds"] > 0 and f"--steps {steps} " in item.runs[0].command
    assert made.baselines and 0 < made.entrants[0].machine["computing"] <= 1
    monkeypatch.setattr(Turns, "train", lambda self: pytest.fail("a finished run was trained again"))
    assert main(words) == 0
    again = as_json(read(folder / "comparison.json"))["entrants"]
    first = json.loads(json.dumps(as_json(made)))["entrants"]
    assert [item["runs"] for item in json.loads(json.dumps(again))] == [item["runs"] for item in first]


def test_time_that_is_over_is_told_before_training(cli, tmp_path, text_file, monkeypatch, cheap):
    monkeypatch.setattr(Turns, "steps", property(lambda self: budget.PROBES))
    monkeypatch.setattr(Turns, "train", lambda self: pytest.fail("trained"))
    code, _, err = cli("compare", "rope", "--data", text_file, *FLAGS, "--out", tmp_path)
    assert code == 2 and "--total-minutes 1: is over before the first round of steps" in err


def test_no_run_is_opened_and_no_step_made_after_the_time(cli, tmp_path, text_file, monkeypatch, cheap):
    """On a busy machine the time can end while runs are opened."""
    monkeypatch.setattr(budget, "create_run", lambda *arguments: pytest.fail("a run was opened"))
    short = [*FLAGS[:-4], "--total-minutes", "1e-6", *FLAGS[-4:]]
    del short[short.index("--total-minutes") : short.index("--total-minutes") + 2]
    code, _, err = cli("compare", "rope", "gla", "--data", text_file, *short, "--out", tmp_path)
    assert code == 2 and "--total-minutes 1e-06: is over before the first round of steps" in err
    slow = SimpleNamespace(make=lambda steps: pytest.fail("a step was made"), contestant=None)
    with pytest.raises(budget.KinformerError, match="is over before the first round"):
        Turns([slow], CompareOptions(total_minutes=1.0), budget.time.monotonic() - 1, 0.0)


class Clock:
    """A clock that stands still but for the steps and validations of members."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Slow:
    """A trainer whose steps take ``seconds``, from step ``after`` on three times as long."""

    def __init__(self, clock, seconds, after=10**9):
        self.clock, self.each, self.after = clock, seconds, after
        self.step, self.validated, self.data = 0, 0.0, SimpleNamespace(validations=4)
        self.course = SimpleNamespace(revise=lambda step, total: None)

    def make(self, steps):
        took = sum(self.each * (3 if self.step + number > self.after else 1) for number in range(steps))
        self.step, self.clock.now = self.step + steps, self.clock.now + took
        return took

    def validate(self):
        self.validated = 2 * self.each
        self.clock.now += self.validated


@pytest.mark.parametrize("after", [10**9, 500])
def test_the_clock_decides_the_steps(monkeypatch, after):
    """The members end together and in time, also where the machine becomes slower on the way."""
    clock = Clock()
    monkeypatch.setattr(budget.time, "monotonic", clock.monotonic)
    options = CompareOptions(total_minutes=10, length=16, batch_size=2)
    turns = []
    for seconds in (0.1, 0.2):
        contestant = SimpleNamespace(name=str(seconds), error=None, record=EntrantRecord(name="a", spec="a", set={}))
        turns.append(budget.Turn(contestant, 0, Slow(clock, seconds, after), None, None))
    both = Turns(turns, options, 600.0, aside=100.0)
    planned = both.steps
    assert 1000 < planned < 500 / 0.3
    clock.now += 100.0
    both._train()
    assert turns[0].trainer.step == turns[1].trainer.step == both.done
    assert 0.95 * 600 < clock.now <= 600.0
    assert both.done > 0.9 * planned if after > planned else 500 < both.done < planned


def test_rates_fall_with_the_width_and_give_way_to_the_users():
    def of(dim, **options):
        return rate(SimpleNamespace(config=SimpleNamespace(dim=dim)), CompareOptions(total_minutes=1, **options))

    rates = [of(dim) for dim in (64, 128, 192, 512, 2048)]
    assert rates == sorted(rates, reverse=True) and rates[0] == rates[1] > rates[2] > rates[3] == rates[4]
    assert of(128, lr=0.5) == 0.5 and of(128, optimizer="adamw") == CompareOptions(optimizer="adamw").middle
