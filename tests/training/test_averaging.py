"""Means of weights: what they are, that they are what is kept, and that training and stops do not change them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kinformer.lab.data import Corpus
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.optimisers import MovingAverage
from kinformer.runtime.files import load_tensors
from tests.training.tiny import curve, gap, train, trainer


def test_mean_is_the_polynomially_decaying_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    share, history = 0.25, [torch.randn(2, 3).double() for _ in range(20)]
    moving = MovingAverage(model, share)
    for step, weight in enumerate(history):
        model.weight.data.copy_(weight)
        moving.update(step)
    # weights of 1 / (1 + share t), each later step taking its share of all before
    expected = torch.zeros(2, 3).double()
    for step, weight in enumerate(history):
        new = 1 / (1 + share * step)
        expected = (1 - new) * expected + new * weight
    torch.testing.assert_close(moving.state_dict()["weight"], expected)
    before = model.weight.detach().clone()
    with moving.applied():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, before)


def test_model_is_put_back_after_an_error() -> None:
    model = nn.Linear(3, 2)
    moving = MovingAverage(model, 0.5)
    model.weight.data.add_(1)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError), moving.applied():
        raise RuntimeError
    assert torch.equal(model.weight, before)


def test_the_mean_is_kept_and_does_not_change_training(corpus: Corpus, tmp_path) -> None:
    train(corpus, tmp_path / "plain")
    train(corpus, tmp_path / "moving", ema=0.5)
    assert curve(tmp_path / "plain") == curve(tmp_path / "moving")
    assert gap(tmp_path / "plain", tmp_path / "moving") == 0.0  # the weights of the last checkpoints
    last = Checkpoints(tmp_path / "moving" / "checkpoints", 1)
    means = load_tensors(last.path(last.steps()[-1]) / "average.safetensors")[0]
    best = load_tensors(tmp_path / "moving" / "model.safetensors")[0]
    assert all(torch.equal(best[name], mean) for name, mean in means.items())
    plain = load_tensors(tmp_path / "plain" / "model.safetensors")[0]
    assert any(not torch.equal(best[name], plain[name]) for name in means)


def test_stops_at_irregular_steps_leave_the_mean_of_checkpoints_as_it_is(corpus: Corpus, tmp_path: Path) -> None:
    options = {"steps": 11, "checkpoint_every": 3, "validate_every": 3, "keep": 1, "average": 3}
    options |= {"lr": 0.03, "warmup": 0.0, "min_lr_ratio": 1.0}
    train(corpus, tmp_path / "whole", **options)
    for stop, retained in ((4, [3, 4]), (5, [3, 5]), (10, [3, 6, 9, 10])):
        stopped_after(stop, corpus, tmp_path / "stopped", **options)
        assert Checkpoints(tmp_path / "stopped" / "checkpoints", 1).steps() == retained
    train(corpus, tmp_path / "stopped", **options)
    whole, stopped = (validations(tmp_path / name) for name in ("whole", "stopped"))
    assert stopped == whole and sum("averaged_loss" in record for record in whole) == 1
    assert gap(tmp_path / "whole", tmp_path / "stopped") == 0.0
    best, also = (load_tensors(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert best[1] == also[1] and all(torch.equal(best[0][name], value) for name, value in also[0].items())
    last = load_tensors(tmp_path / "whole" / "checkpoints" / "step-00000011" / "model.safetensors")[0]
    assert any(not torch.equal(best[0][name], value) for name, value in last.items())  # the mean is what is kept


def stopped_after(step: int, corpus: Corpus, folder: Path, **options: Any) -> None:
    """Train until a signal comes in update number ``step``."""
    folder.mkdir(exist_ok=True)
    run = trainer(corpus, folder, **options)
    add = run.moving.update
    run.moving.update = lambda at: (os.kill(os.getpid(), signal.SIGINT) if at + 1 == step else None, add(at))  # type: ignore
    assert run.run().signal == signal.SIGINT


def validations(folder: Path) -> list[dict[str, float]]:
    """What was measured, without times, of validations and of the mean at the end."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" not in record]
