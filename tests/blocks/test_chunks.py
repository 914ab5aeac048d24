"""A feed-forward in parts of the time axis: the same outputs and gradients, and less in memory."""

import pytest
import torch

from kinformer.blocks.feed_forward import MLP, Boom, SwiGLU
from kinformer.lab.estimation.estimate import Live
from kinformer.runtime.errors import KinformerError

CONFIGS = [
    MLP.Config(hidden_dim=24),
    MLP.Config(hidden_dim=24, slices=2),
    SwiGLU.Config(hidden_dim=24),
    Boom.Config(hidden_dim=24),
]


def outcome(config, x):
    torch.manual_seed(0)
    module, x = config.build(12).double(), x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(weight.grad for weight in module.parameters())]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize(("chunks", "time"), [(4, 11), (4, 3), (9, 1)])
def test_parts_are_the_whole(config, chunks, time):
    x = torch.randn(2, time, 12, dtype=torch.float64)
    for got, want in zip(outcome(config.replace(chunks=chunks), x), outcome(config, x), strict=True):
        assert (got - want).abs().max() < 1e-12


def test_dropped_activations_are_dropped_again():
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    torch.manual_seed(0)
    module = Boom.Config(hidden_dim=24, dropout=0.5, chunks=2, bias=False, activation="relu").build(12).double()
    x.requires_grad_()
    y = module(x)
    y.sum().backward()
    assert torch.allclose((x * x.grad).sum(), y.sum())  # homogeneous of degree one: Euler's theorem, for equal masks


def peak(chunks, train):
    module, x = MLP.Config(hidden_dim=256, chunks=chunks).build(16), torch.randn(1, 512, 16, requires_grad=train)
    with Live([x, *module.parameters()]) as live, torch.set_grad_enabled(train):
        y = module(x)
        if train:
            y.sum().backward()
    return live.peak


@pytest.mark.parametrize("train", [True, False])
def test_one_part_is_in_memory_at_a_time(train):
    assert peak(8, train) < peak(1, train) / 3


def test_no_chunk_is_refused():
    with pytest.raises(KinformerError, match="chunks must be 1 or more, but is 0"):
        MLP.Config(chunks=0)
