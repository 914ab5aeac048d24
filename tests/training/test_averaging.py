"""The moving mean of the weights: what it is, that it is what is kept, and that training goes on as without it."""

import pytest
import torch
from torch import nn

from kinformer.data import Corpus
from kinformer.runtime.files import load_tensors
from kinformer.training.averaging import MovingAverage
from kinformer.training.checkpoint import Checkpoints
from tests.training.tiny import curve, gap, train


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
