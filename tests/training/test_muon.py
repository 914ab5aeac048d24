"""Muon with matrices of one shape in one product makes the updates of PyTorch's, one matrix after the other."""

import pytest
import torch
from torch.optim import Muon

from kinformer.lab.training import optimisers as muon
from kinformer.lab.training.optimisers import StackedMuon

SHAPES = [(16, 16), (48, 16), (16, 16), (16, 48), (48, 16), (5, 3)]


def weights():
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in SHAPES]


@pytest.mark.parametrize("small", [0, 256, 1 << 18])
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_are_those_of_pytorch(monkeypatch, small, nesterov):
    monkeypatch.setattr(muon, "SMALL", small)
    monkeypatch.setattr(muon, "PRECISION", dict.fromkeys(muon.PRECISION, torch.bfloat16))
    ours, theirs = weights(), weights()
    stacked = StackedMuon([{"params": ours[:4], "weight_decay": 0.3}, {"params": ours[4:], "weight_decay": 0.0}], 0.02)
    single = Muon(
        [{"params": theirs[:4], "weight_decay": 0.3}, {"params": theirs[4:], "weight_decay": 0.0}],
        lr=0.02,
        adjust_lr_fn="match_rms_adamw",
    )
    for optimiser in (stacked, single):
        for group in optimiser.param_groups:
            group["nesterov"] = nesterov
    for step in range(4):
        torch.manual_seed(step)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours[2].grad = theirs[2].grad = None  # has no part in the loss
        stacked.step()
        single.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)  # products of bfloat16 in another order
        first, second = stacked.state.get(a, {}), single.state.get(b, {})
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key])


def test_directions_have_singular_values_near_one():
    torch.manual_seed(0)
    stack = torch.randn(3, 24, 8).bfloat16()
    directions = muon.orthogonalised(stack, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    values = torch.linalg.svdvals(directions.float())
    assert directions.shape == stack.shape
    assert float(values.min()) > 0.4 and float(values.max()) < 1.6


@pytest.mark.parametrize("shape", [(3, 24, 8), (3, 8, 24), (24, 8), (3, 8, 8), (2, 8, 12)])
def test_float32_iterations_are_those_of_float64(shape):
    """The factor of the short side, which float32 takes for long matrices, gives what the plain iterations give."""
    torch.manual_seed(0)
    stack = torch.randn(shape)
    exact = muon.orthogonalised(stack.double(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    torch.testing.assert_close(
        muon.orthogonalised(stack, (3.4445, -4.7750, 2.0315), 5, 1e-7).double(), exact, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_the_table_of_processors_chooses_the_type_of_the_iterations(monkeypatch, precision):
    monkeypatch.setattr(muon, "PRECISION", dict.fromkeys(muon.PRECISION, precision))
    seen = []
    plain = muon.orthogonalised

    def recorded(x, *settings):
        seen.append(x.dtype)
        return plain(x, *settings)

    monkeypatch.setattr(muon, "orthogonalised", recorded)
    parameters = weights()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    StackedMuon([{"params": parameters}], 0.02).step()
    assert set(seen) == {precision}
