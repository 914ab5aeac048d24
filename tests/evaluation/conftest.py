"""A small text and tiny untrained models."""

import random

import pytest
import torch

import kinformer
from kinformer.data import open_corpus


@pytest.fixture(scope="package")
def text_file(tmp_path_factory):
    """About 14,000 bytes of words in lines; a twentieth of it is the test split."""
    words = random.Random(0).choices(["wind", "tree", "naïve", "river", "€", "sings", "under"], k=2500)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(
        "\n".join(" ".join(words[start : start + 9]) for start in range(0, len(words), 9)), encoding="utf-8"
    )
    return path


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
