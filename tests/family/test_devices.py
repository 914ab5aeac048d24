"""Every tensor that a model makes for itself is where its inputs are: none is on PyTorch's default device.

The default device is "meta" here, whose tensors mix with no others, while weights and inputs are on the CPU. So a GPU
is not needed to see what would fail on it.
"""

import pytest
import torch

from kinformer.family.build import configure
from tests.family.values import values_of
from tests.members import CAUSAL, ENCODERS, IMAGES, SOUND, SOURCE, TRAJECTORIES


def in_whole(name):
    """A tiny model of its member and inputs for it."""
    config = configure(name, "tiny", 61 if name in CAUSAL + ENCODERS + SOURCE else None)
    model = config.build()
    return model, values_of(model, 2, 40)


@pytest.mark.parametrize("name", CAUSAL + TRAJECTORIES)
def test_causal_model(name):
    model, values = in_whole(name)
    with torch.device("meta"):
        logits, state = model(values)
        (logits if isinstance(logits, torch.Tensor) else logits[0]).float().sum().backward()
        model.eval()
        with torch.inference_mode():
            _, state = model(values[:, :3])
            model(values[:, :1], state)


@pytest.mark.parametrize("name", ENCODERS + IMAGES + SOUND)
def test_encoder(name):
    model, values = in_whole(name)
    with torch.device("meta"):
        model(values).float().sum().backward()


@pytest.mark.parametrize("name", SOURCE)
def test_model_of_a_source(name):
    model, values = in_whole(name)
    with torch.device("meta"):
        logits, _ = model(values, model.begin(values))
        logits.float().sum().backward()
