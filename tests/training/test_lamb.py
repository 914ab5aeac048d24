"""LAMB, against its algorithm written out in float64, and AdamW where every trust is 1."""

import torch
from torch import nn

from kinformer.family.build import build
from kinformer.lab.training.optimisers import EPS, Lamb, Optimiser
from kinformer.lab.training.settings import Settings


def test_it_is_the_algorithm():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    zero = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimiser = Lamb([{"params": [weight, zero]}], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    want = [tensor.detach().clone() for tensor in (weight, zero)]
    means = [[torch.zeros_like(tensor) for tensor in want] for _ in range(2)]
    for step in range(1, 5):
        for number, parameter in enumerate((weight, zero)):
            gradient = parameter.grad = torch.randn_like(parameter)
            m = means[0][number] = 0.8 * means[0][number] + 0.2 * gradient
            v = means[1][number] = 0.9 * means[1][number] + 0.1 * gradient**2
            r = m / (1 - 0.8**step) / ((v / (1 - 0.9**step)).sqrt() + EPS) + 0.2 * want[number]
            trust = want[number].norm() / r.norm() if want[number].any() else 1.0
            want[number] = want[number] - 0.1 * trust * r
        optimiser.step()
        for parameter, wanted in zip((weight, zero), want, strict=True):
            torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=1e-12)


def test_a_tensor_moves_by_a_share_of_its_length_and_its_state_survives():
    model = build("gpt", "tiny", 23)
    settings = Settings(optimizer="lamb", weight_decay=0.0)
    optimiser, twin = Optimiser(model, settings), build("gpt", "tiny", 23)
    twin.load_state_dict(model.state_dict())
    second = Optimiser(twin, settings)

    def step(which, of, rate):
        for parameter in of.parameters():
            parameter.grad = torch.full_like(parameter, 0.3).add_(parameter)
        which.step(rate)

    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step(optimiser, model, 0.01)
    for name, weight in model.named_parameters():
        if before[name].any():
            torch.testing.assert_close((weight - before[name]).norm() / before[name].norm(), torch.tensor(0.01))
    twin.load_state_dict(model.state_dict())
    second.load({name: tensor.clone() for name, tensor in optimiser.tensors()}, "here")
    step(optimiser, model, 0.01)
    step(second, twin, 0.01)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
