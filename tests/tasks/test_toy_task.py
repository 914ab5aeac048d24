"""A task costs its page and a line: floats in, a regression out, through train, evaluate, resume and ``--json``, from
Python and from the command line."""

import json

import pytest
import torch

import kinformer
from kinformer.family.kinds import kinds
from kinformer.family.table import MEMBERS
from kinformer.lab.tasks.table import TASKS
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors

from . import toy_task

SMALL = {"steps": 12, "length": 8, "batch_size": 4, "lr": 1e-2, "checkpoint_every": 6, "threads": 1, "device": "cpu"}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(autouse=True)
def the_line(monkeypatch):
    """The task's line in its table, and a member that can do it."""
    monkeypatch.setitem(TASKS, toy_task.TASK.name, toy_task.TASK)
    monkeypatch.setitem(MEMBERS, toy_task.MEMBER.name, toy_task.MEMBER)
    monkeypatch.setitem(kinds()["input"].builtin, "frames", toy_task.Frames.Config)
    monkeypatch.setitem(kinds()["head"].builtin, "frequency", toy_task.Frequency.Config)


def test_from_the_command_line(cli, tmp_path):
    out = tmp_path / "run"
    code, told, err = cli("train", "toy", *FLAGS, "--task", "regression", "--noise", "0.2", "--out", out, "--json")
    assert code == 0, err
    told = json.loads(told)
    assert told["steps"] == 12 and told["validation_mean_squared_error"] < 1
    assert "squared hertz" in err
    config = json.loads((out / "config.json").read_text())
    assert config["task"] == {"name": "regression", "options": {"noise": 0.2}} and config["tokenizer"] is None
    code, measured, _ = cli("evaluate", out, "--waves", "32", "--json")
    measured = json.loads(measured)
    assert code == 0 and measured["mean_squared_error"] > 0 and measured["of_the_mean"] > 0
    code, text, _ = cli("evaluate", out)
    assert code == 0 and "squared hertz of 64 waves" in text
    code, told, _ = cli("train", "toy", "--out", out, "--resume", "--steps", "20", "--json")
    assert code == 0 and json.loads(told)["steps"] == 20
    assert "regression options" in cli("train", "--task", "regression", "--help")[1]


def test_from_python(tmp_path):
    run = kinformer.train("toy", out=tmp_path / "run", task="regression", noise=0.0, quiet=True, **SMALL)
    assert (run.member, run.task.name, run.options.noise, run.tokenizer) == ("toy", "regression", 0.0, None)
    assert run.config.dim == 4 and list(run.metrics) == ["mean_squared_error"]
    found = kinformer.evaluate(tmp_path / "run", waves=16)
    assert found.metrics.keys() == {"mean_squared_error"} and found.units[0].lower_is_better
    assert found.baselines["of_the_mean"] > 0
    assert kinformer.load(tmp_path / "run")(torch.zeros(2, 8)).shape == (2,)
    assert kinformer.tasks()[-1] is toy_task.TASK


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = kinformer.train("toy", out=tmp_path / "whole", task="regression", **SMALL)
    cut = kinformer.train("toy", out=tmp_path / "cut", task="regression", **SMALL)
    newest = max((cut.folder / "checkpoints").iterdir())
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    again = kinformer.train("toy", out=tmp_path / "cut", resume=True)
    ends = [
        load_tensors(max((run.folder / "checkpoints").iterdir()) / "model.safetensors")[0] for run in (whole, again)
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert again.metrics == whole.metrics


@pytest.mark.parametrize(
    ("member", "options", "told"),
    [
        ("toy", {"task": "regression", "nois": 1.0}, "'nois' is not an option; did you mean 'noise'"),
        ("toy", {"task": "regression", "noise": -1.0}, "--noise is -1 but must be 0 or more"),
        ("toy", {"task": "regression", "data": "x"}, "data x: waves are made up"),
        ("toy", {"task": "regression", "segments": True}, "segments: is for the task next-token, not for regression"),
        ("gpt", {"noise": 1.0}, "noise 1.0: is for the task regression, not for next-token"),
        ("gpt", {"task": "regression"}, "gpt is causal, whose tasks are next-token"),
        ("toy", {"task": "regressoin"}, "did you mean 'regression'"),
        ("toy", {"task": "regression", "objective": "mlm-cpc"}, "choose squared-error, or leave it out"),
    ],
)
def test_mistakes(tmp_path, member, options, told):
    with pytest.raises(KinformerError) as error:
        kinformer.train(member, out=tmp_path / "run", **SMALL, **options)
    assert told in str(error.value)
    assert not (tmp_path / "run").exists()


def test_what_it_cannot_do_is_one_sentence(cli, tmp_path):
    kinformer.train("toy", out=tmp_path / "run", task="regression", **SMALL)
    for arguments, told in (
        (("generate", tmp_path / "run", "--prompt", "x"), "the task generates nothing"),
        (("evaluate", tmp_path / "run", "--contexts", "8"), "--contexts: is for models of the next token"),
        (("index", tmp_path / "run", "--datastore", tmp_path / "store"), "is not a causal decoder"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2 and told in err and err.count("\n") == 1
