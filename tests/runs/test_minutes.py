"""What a budget of minutes chooses: what was given is kept, what was not suits the machine, the data and the member."""

from __future__ import annotations

import shlex
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kinformer
from kinformer.core.config import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY, member
from kinformer.lab.cli.main import main
from kinformer.lab.runs.minutes import REREAD, SIZES, learning_rate, resized, rotated
from kinformer.lab.runs.run import open_run
from kinformer.lab.runs.train import warning
from kinformer.lab.training.data_module import rows_of
from kinformer.lab.training.loop import Updater
from kinformer.lab.training.settings import Settings
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError

TEXT = ("It was the best of times, it was the worst of times; " * 40 + "and so on to the end of the page.\n") * 60


ROTATED = {"gpt", "sparse-transformer"}
"""Members whose positions are vectors learned for each, for want of others."""


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def steps_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes every step of the first size take so many seconds, others in proportion to their cost."""

    def seconds(each: float) -> None:
        def measured(self: Updater, limit: float) -> float:
            dim = next(iter(self.engine.parameters())).shape[-1]
            rows = self.settings.batch_size
            return each * next((size.cost for size in SIZES if (size.dim, size.rows) == (dim, rows)), 1.0)

        monkeypatch.setattr(Updater, "seconds_per_step", measured)

    return seconds


class StopError(Exception):
    pass


def stop(job: Any, group: Any) -> None:
    raise StopError


def chosen(book: Path, **given: Any) -> Any:
    """The run that ``given`` options begin; it is stopped before its first step."""
    options = {"data": str(book), "out": str(book.parent / "run"), "minutes": 10} | given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kinformer.lab.runs.train.work", stop)
        with pytest.raises(StopError):
            kinformer.train(options.pop("member", "gpt"), quiet=True, **options)
    return open_run(options["out"])


def test_a_faster_machine_gets_a_larger_model(book: Path, steps_of: Any, tmp_path: Path) -> None:
    widths = []
    for number, each in enumerate((10.0, 0.1, 0.01, 0.001)):
        steps_of(each)
        widths.append(chosen(book, out=str(tmp_path / str(number))).config.dim)
    assert widths == sorted(widths) and widths[0] == SIZES[0].dim and len(set(widths)) > 2


def test_what_is_given_is_kept(book: Path, steps_of: Any) -> None:
    steps_of(0.01)
    given = {
        "length": 24,
        "batch_size": 3,
        "lr": 7e-4,
        "optimizer": "adamw",
        "precision": "fp32",
        "weight_decay": 0.2,
        "ema": 0.0,
    }
    run = chosen(book, **given, tokenizer="bytes", set={"dim": 48, "layers.*.mixer.num_heads": 3})
    assert {name: run.training[name] for name in given} == given
    assert run.config.dim == 48 and run.config.layers[0].mixer.num_heads == 3 and run.vocabulary == "bytes"
    assert run.config.layers[0].feed_forward.hidden_dim == configure("gpt").layers[0].feed_forward.hidden_dim
    assert positions(run.config)[1] == "rope"


def test_the_flags_that_are_told_choose_the_same(book: Path, steps_of: Any, capsys: Any, tmp_path: Path) -> None:
    steps_of(0.05)
    told, again = tmp_path / "told", tmp_path / "again"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kinformer.lab.runs.train.work", stop)
        common = ["train", "gpt", "--data", str(book), "--minutes", "10"]
        with pytest.raises(StopError):
            main([*common, "--out", str(told)])
        lines = capsys.readouterr().err.splitlines()
        flags = shlex.split(next(line for line in lines if "--length" in line).partition("kinformer: ")[2])
        with pytest.raises(StopError):
            main([*common, "--out", str(again), *flags])
    first, second = open_run(told), open_run(again)
    assert first.config == second.config and first.training == second.training
    assert first.options == second.options and first.tokenizer.fingerprint == second.tokenizer.fingerprint


@pytest.mark.parametrize(
    ("minutes", "of_a_row", "of_a_step", "recipe", "rows"),
    [(4000, 0, 1e-7, "small", 64), (4, 1e3, 0, "tiny", 8), (4, 0, 1e3, "tiny", 64), (4, 1e-3, 0, "tiny", 64)],
    ids=["fast", "slow rows", "slow steps", "enough steps"],
)
def test_the_smallest_recipe_gets_rows_before_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Any,
    minutes: int,
    of_a_row: float,
    of_a_step: float,
    recipe: str,
    rows: int,
) -> None:
    def seconds(self: Updater, limit: float, clock: Any = None) -> float:
        return of_a_step + of_a_row * rows_of(self.data.batch(0, 0, 1))

    monkeypatch.setattr(Updater, "seconds_per_step", seconds)
    monkeypatch.setattr(time, "process_time", time.monotonic)
    given = ["vit", "--data", "digits", "--minutes", str(minutes)]
    run = stopped(*given, "--out", str(tmp_path / "run"))
    assert (run.recipe, run.training["batch_size"]) == (recipe, rows)
    told = capsys.readouterr().err
    assert f"in {minutes} minutes about" in told and ("--recipe tiny" in told) == (recipe == "tiny")
    rate = run.training["lr"]
    assert rate == pytest.approx(learning_rate(run.config.dim, rows), rel=0.05)
    sizes = ["--recipe", "small", "--batch-size", "8", "--lr", "0.002"]
    chosen = stopped(*given, "--out", str(tmp_path / "again"), *sizes)
    assert (chosen.recipe, chosen.training["batch_size"], chosen.training["lr"]) == ("small", 8, 0.002)


def test_rows_are_as_long_as_the_data_and_positions_follow(tmp_path: Path) -> None:
    table = tmp_path / "texts.csv"
    lines = [f"{'ab'[number % 2] * 150},{'xy'[number % 2]}" for number in range(40)]
    table.write_text("\n".join(["text,label", *lines]))
    given = ["bert", "--task", "classify", "--data", str(table), "--minutes", "0.02"]
    run = stopped(*given, "--out", str(tmp_path / "texts"))
    assert run.training["length"] == 152 == run.config.position.max_length and run.config.dim == 32
    assert run.config.dropout == run.config.layers[0].dropout == 0.1
    run = stopped(*given, "--out", str(tmp_path / "short"), "--length", "24")
    assert run.training["length"] == 24


def test_a_task_has_values_for_a_limited_time(tmp_path: Path) -> None:
    given = ["gated-deltanet", "--task", "recall", "--pairs", "8", "--minutes", "0.02", "--out"]
    run = stopped(*given, str(tmp_path / "run"))
    assert (run.training["length"], run.training["lr"], run.config.initialisation.scheme) == (32, 0.01, "framework")
    run = stopped(*given, str(tmp_path / "own"), "--lr", "0.002", "--length", "64", "--set", "dim=32")
    assert (run.training["length"], run.training["lr"], run.config.dim) == (64, 0.002, 32)


def stopped(*arguments: str) -> Any:
    """The run that a command begins; it is stopped before its first step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kinformer.lab.runs.train.work", stop)
        with pytest.raises(StopError):
            main(["train", *arguments])
    return open_run(arguments[arguments.index("--out") + 1])


def test_a_run_of_fewer_steps_than_a_warm_up_says_so(cli: Any, book: Path, tmp_path: Path) -> None:
    common = ["train", "gpt", "--recipe", "tiny", "--tokenizer", "bytes", "--data", str(book), "--length", "16"]
    code, _, told = cli(*common, "--out", str(tmp_path / "short"), "--minutes", "1e-9")
    assert code == 0 and "only 1 step could be made in 1e-09 minutes" in told
    code, _, told = cli(*common, "--out", str(tmp_path / "cold"), "--steps", "3", "--warmup", "5")
    assert code == 0 and "a warm-up of 5 steps does not end in a run of 3 steps" in told
    code, _, told = cli(*common, "--out", str(tmp_path / "warm"), "--steps", "3")
    assert code == 0 and "warm-up" not in told


def test_steps_alone_keep_the_defaults(book: Path) -> None:
    run = chosen(book, minutes=None, steps=1)
    defaults = {each.name: each.default for each in fields(Settings)}
    assert {name: value for name, value in run.training.items() if value != defaults[name]} == {
        "steps": 1, "objective": "next-token", "validation_tokens": 16_384,
    }  # fmt: skip
    assert run.config == configure("gpt", "small", 256) and run.vocabulary == "bytes"


def test_a_given_recipe_keeps_its_model(book: Path, steps_of: Any) -> None:
    steps_of(1.0)
    assert chosen(book, recipe="tiny", tokenizer="bytes").config == configure("gpt", "tiny", 256)


def test_text_that_is_learnt_by_heart_gets_dropout_and_weight_decay(book: Path, steps_of: Any, tmp_path: Path) -> None:
    for seconds, reread in zip((1.7, 1.0, 0.001), REREAD, strict=True):
        steps_of(seconds)
        run = chosen(book, out=str(tmp_path / str(seconds)))
        assert run.config.layers[0].dropout == reread.dropout and run.training["weight_decay"] == reread.weight_decay
    run = chosen(book, minutes=1e-4, out=str(tmp_path / "short"))
    assert run.config.layers[0].dropout == 0 and run.training["weight_decay"] == Settings().weight_decay
    run = chosen(book, out=str(tmp_path / "kept"), set={"layers.*.dropout": 0.3}, weight_decay=0.0)
    assert run.config.layers[0].dropout == 0.3 and run.training["weight_decay"] == 0.0


def test_a_member_has_what_it_needs(book: Path, steps_of: Any) -> None:
    steps_of(0.05)
    assert chosen(book, member="transformer-xl").options.segments


def test_learned_positions_become_rotary_and_gelu_exact(book: Path, steps_of: Any, tmp_path: Path) -> None:
    steps_of(0.05)
    config = chosen(book).config
    assert positions(config) == ["none", *["rope"] * len(config.layers)]
    assert {layer.feed_forward.activation for layer in config.layers} == {"gelu"}
    kept = {"layers.*.feed_forward.activation": "gelu_tanh"}
    config = chosen(book, out=str(tmp_path / "kept"), set=kept).config
    assert {layer.feed_forward.activation for layer in config.layers} == {"gelu_tanh"}
    for number, given in enumerate(({"layers.*.mixer.position": "alibi", "position": "none"}, {"position": "timing"})):
        config = chosen(book, out=str(tmp_path / str(number)), set=given).config
        assert positions(config)[0] == given["position"] and "rope" not in positions(config)


@pytest.mark.parametrize("name", sorted(name for name in FAMILY if member(name).causal))
def test_a_members_own_positions_stay(name: str) -> None:
    recipe = configure(name)
    config = override(recipe, rotated(recipe), kinds())
    with unallocated():
        config.build()
    plain = name in ROTATED
    assert positions(config) == (["none", *["rope"] * len(recipe.layers)] if plain else positions(recipe))


def positions(config: Any) -> list[str]:
    """Kinds, of the model and of every layer's mixer."""
    parts = [config, *(getattr(layer, "mixer", None) for layer in config.layers)]
    return [getattr(getattr(part, "position", None), "kind", "none") for part in parts]


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_every_member_can_be_resized(name: str) -> None:
    recipe = configure(name)
    resized_config = override(recipe, resized(recipe, 128), kinds())
    with torch.device("meta"):
        small, usual = resized_config.build(), recipe.build()
    assert resized_config.dim == 128 and (parameters(small) < parameters(usual)) == (recipe.dim > 128)


def parameters(model: Any) -> int:
    return sum(each.numel() for each in model.parameters())


def test_too_little_data_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(KinformerError, match="short.txt|tokens"):
        kinformer.train("gpt", data=str(tmp_path / "short.txt"), out=str(tmp_path / "run"), minutes=0.01, quiet=True)


def test_speed_is_measured_with_the_threads_that_train(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, measured = torch.get_num_threads(), []
    monkeypatch.setattr(
        Updater, "seconds_per_step", lambda self, limit: measured.append(torch.get_num_threads()) or 1.0
    )
    try:
        torch.set_num_threads(2)
        chosen(book, threads=1)
    finally:
        torch.set_num_threads(before)
    assert set(measured) == {1}


def test_a_run_of_few_steps_names_the_share_of_the_time_in_which_it_computed():
    made: Any = SimpleNamespace(steps=1, signal=0)
    busy = "fewer than a warm-up takes (20), as this process computed for 10% of the time, so little is learnt"
    assert busy in str(warning(made, Settings(minutes=0.5), 0.1))
    assert "fewer than a warm-up takes (20), so little is learnt" in str(warning(made, Settings(minutes=0.5), 0.9))
