"""A small text and tiny untrained models."""

import pytest
import torch

import kinformer
from kinformer.lab.data import open_corpus


@pytest.fixture(scope="package")
def corpus(text_file):
    return open_corpus(str(text_file))


@pytest.fixture(params=["gpt", "linear-transformer", "fast-weights"], scope="package")
def model(request):
    return tiny(request.param)


def tiny(name, **changes):
    torch.manual_seed(0)
    model = kinformer.build(name, recipe="tiny", set=changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model
