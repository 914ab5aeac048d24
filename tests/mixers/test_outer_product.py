"""Fast weights behind an activation: the contract, their formula, and kernel attention where there is none."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.recurrent import OuterProduct
from kinformer.parts.feature_maps import Identity
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

SMALL = OuterProduct.Config(num_heads=2)


def outputs(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype))[0]


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "implementations"])
def test_contract(check):
    CHECKS[check](MixerSubject(lambda: SMALL.build(DIM), dim=DIM))


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu"])
def test_it_is_its_formula(activation):
    mixer, x = built(SMALL.replace(activation=activation)), inputs(35)
    q, a, b = mixer.qkv(x).chunk(3, -1)
    rows = []
    for row in range(2):
        heads = []
        for head in (slice(0, 8), slice(8, 16)):
            weights, read = torch.zeros(8, 8, dtype=x.dtype), []
            for t in range(35):
                weights = getattr(torch, activation)(weights + torch.outer(a[row, t, head], b[row, t, head]))
                read.append(q[row, t, head] @ weights / 8**0.5)
            heads.append(torch.stack(read))
        rows.append(torch.cat(heads, -1))
    torch.testing.assert_close(outputs(mixer, x), mixer.out(torch.stack(rows)), rtol=0, atol=1e-12)


def test_without_an_activation_it_is_kernel_attention():
    mixer, x = built(SMALL.replace(activation="identity")), inputs(40)
    kernel = LinearAttention.Config(
        num_heads=2, feature_map=Identity.Config(), normaliser="none", scale=True, bias=False
    ).build(DIM)
    kernel.double().load_state_dict(mixer.state_dict())
    torch.testing.assert_close(outputs(mixer, x), outputs(kernel, x), rtol=0, atol=1e-12)
    curved = built(SMALL)
    curved.load_state_dict(mixer.state_dict())
    assert (outputs(curved, x) - outputs(mixer, x)).detach().abs().max() > 1e-3


def test_the_recipe_and_a_wrong_activation():
    model = kinformer.build("fast-weights", recipe="tiny-outer", vocab_size=23)
    assert model(torch.zeros(1, 5, dtype=torch.int64))[0].shape == (1, 5, 23)
    with pytest.raises(KinformerError, match="activation of the mixer 'outer_product'"):
        SMALL.replace(activation="softmax")
