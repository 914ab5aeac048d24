"""The activations of feed-forwards, by their formulas."""

import math

import pytest
import torch

from kinformer.blocks.feed_forward import MLP

FORMULAS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_sigmoid": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x * (x > 0),
    "squared_relu": lambda x: x * x * (x > 0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_is_its_formula(name):
    mlp = MLP.Config(hidden_dim=4, activation=name).build(4).double()
    with torch.no_grad():
        for product in (mlp.up, mlp.down):
            product.weight.copy_(torch.eye(4))
            product.bias.zero_()
        x = torch.linspace(-5, 5, 40, dtype=torch.float64).view(10, 4)
        assert (mlp(x) - FORMULAS[name](x)).abs().max() < 1e-14
