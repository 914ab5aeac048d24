"""Adagrad with clipping by parameter, against the authors' code of adaptive spans."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.lab.training.optimisers import ClippedAdagrad, Optimiser
from kinformer.lab.training.settings import Settings

GOLDEN = Path(__file__).parents[1] / "golden" / "adagrad_clip.npz"


def test_steps_are_the_authors():
    with np.load(GOLDEN, allow_pickle=False) as found:
        arrays = {key: torch.from_numpy(found[key]) for key in found}
    parameters = [torch.nn.Parameter(arrays[f"in.param{n}"].clone()) for n in range(3)]
    optimiser = ClippedAdagrad(parameters, lr=0.07, clip=0.03)
    for step in range(4):
        for n, parameter in enumerate(parameters):
            parameter.grad = arrays[f"in.step{step}.grad{n}"].clone()
        optimiser.step()
        for n, parameter in enumerate(parameters):
            assert (parameter - arrays[f"out.step{step}.param{n}"]).abs().max() < 1e-15
            assert (optimiser.state[parameter]["sum"] - arrays[f"out.step{step}.sum{n}"]).abs().max() < 1e-15


def test_the_option_clips_each_parameter_and_not_all_together():
    """A first step is lr * sign(g), made shorter by the parameter's own norm; matrices also decay."""
    model = torch.nn.Linear(2, 1).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = Optimiser(model, Settings(optimizer="adagrad", lr=0.1, clip=1.0, weight_decay=0.5))
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, -4.0]]).double(), torch.tensor([0.5]).double()
    assert float(optimiser.clip(1.0)) == pytest.approx(25.25**0.5)
    assert model.weight.grad.tolist() == [[3.0, -4.0]]
    optimiser.step(0.1)
    want = before[0] * 0.95 - torch.tensor([[0.02, -0.02]]), before[1] - 0.1
    for parameter, each in zip(model.parameters(), want, strict=True):
        assert (parameter - each).abs().max() < 1e-9
