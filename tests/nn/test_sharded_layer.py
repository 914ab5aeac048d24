"""A layer whose weights are sharded over two processes gives the loss and the gradients of one process."""

import pytest
import torch

from kinformer.lab.training.distributed import launch
from tests.nn.two_processes import CASES, learned, work


@pytest.fixture(scope="module")
def sharded():
    """What two processes compute with every layer, by name and whether it is the whole layer."""
    return launch(work, (), 2)


@pytest.mark.parametrize(("name", "block"), CASES)
def test_two_processes_give_what_one_gives(sharded, name, block):
    want, got = learned(name, block, slice(None)), sharded[name, block]
    assert got.keys() == want.keys() and len(got) > 1
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, atol=1e-10, rtol=1e-9)
