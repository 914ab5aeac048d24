"""Observations as input: their formula, and what is none."""

import pytest
import torch

from kinformer.inputs.signals import Observations
from kinformer.runtime.errors import KinformerError


def test_an_observation_keeps_how_large_it_is():
    torch.manual_seed(0)
    input = Observations.Config(observation_dim=3).build(8).double()
    seen = torch.randn(2, 4, 3).double()
    want = input.norm(seen @ input.product.weight[:, :3].T + input.product.weight[:, 3])
    assert torch.allclose(input(seen, torch.zeros(2, 4)), want)
    assert not torch.allclose(input(2 * seen, torch.zeros(2, 4)), want)
    assert input.example(2, 5).shape == (2, 5, 3)


def test_mistakes():
    with pytest.raises(KinformerError, match="observation_dim must be 1 or more"):
        Observations.Config(observation_dim=0)
    input = Observations.Config(observation_dim=3).build(8)
    for bad in (torch.zeros(2, 4), torch.zeros(2, 4, 2), torch.zeros(2, 4, 3, dtype=torch.int64)):
        with pytest.raises(KinformerError, match=r"observations must be floats \[batch, time, 3\]"):
            input.check(bad)
