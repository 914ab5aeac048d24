"""One module for every slice of a token."""

import pytest
import torch

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.residual import LayerNorm
from kinformer.runtime.errors import KinformerError


@pytest.mark.parametrize("config", [LayerNorm(slices=3), MLP.Config(hidden_dim=7, slices=3)])
def test_every_slice_goes_through_the_same_weights(config):
    torch.manual_seed(0)
    whole, part = config.build(12), config.replace(slices=1).build(4)
    part.load_state_dict({name.removeprefix("inner."): weight for name, weight in whole.state_dict().items()})
    x = torch.randn(2, 5, 12)
    want = torch.cat([part(piece) for piece in x.chunk(3, -1)], -1)
    assert (whole(x) - want).abs().max() < 1e-6


@pytest.mark.parametrize("slices", [0, 5])
def test_slices_must_be_equal(slices):
    with pytest.raises(KinformerError, match=f"slices = {slices} does not divide dim = 12"):
        LayerNorm(slices=slices).build(12)
