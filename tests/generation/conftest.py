"""Tiny untrained models in float64, one of each member."""

import pytest
import torch

import kinformer

MEMBERS = ["gpt", "linear-transformer", "fast-weights"]


@pytest.fixture(params=MEMBERS, scope="module")
def model(request):
    return tiny(request.param)


def tiny(name, **changes):
    torch.manual_seed(0)
    model = kinformer.build(name, recipe="tiny", set={"input.vocab_size": 17} | changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


@pytest.fixture(scope="module")
def gpt():
    return tiny("gpt")


@pytest.fixture(scope="module")
def linear():
    return tiny("linear-transformer")


@pytest.fixture
def prompt():
    return torch.randint(0, 17, (3, 11), generator=torch.Generator().manual_seed(1))
