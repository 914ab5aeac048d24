"""The whole Primer: queries made of the keys, and norms behind feed-forwards alone."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import PreNorm, ResPostNorm
from kinformer.core.contract import Chunk
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import Convolved, MultiHead, SharedQK
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

DIM = 16
CONFIG = SoftmaxAttention.Config(num_heads=2, projection=SharedQK.Config(), bias=False)


def outputs(module, x):
    return module(Chunk(x), module.initial_state(len(x), dtype=x.dtype))[0]


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "implementations"])
def test_contract(check):
    CHECKS[check](MixerSubject(lambda: CONFIG.build(DIM), dim=DIM))


def test_it_is_the_authors_formula():
    """q = W_q k of the convolved keys of all heads (``MDHA.mdha_shared_qk``)."""
    torch.manual_seed(0)
    mixer, x = CONFIG.build(DIM).double(), torch.randn(2, 9, DIM, dtype=torch.float64)
    part = mixer.projection
    with torch.no_grad():
        part.weight.normal_()
    taps = part.weight.permute(1, 2, 0).flatten(0, 1)[:, None].flip(-1)  # [channels, 1, width], the token itself last
    kv = functional.conv1d(functional.pad(part.kv(x).mT, (2, 0)), taps, groups=2 * DIM).mT
    k, v = kv.chunk(2, -1)
    q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (k @ part.query.weight.T, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs(mixer, x), mixer.out(y), rtol=0, atol=1e-12)


def test_with_queries_of_the_identity_it_is_convolved_keys_twice():
    torch.manual_seed(0)
    mixer, x = CONFIG.build(DIM).double(), torch.randn(2, 9, DIM, dtype=torch.float64)
    plain = CONFIG.replace(projection=Convolved.Config(inner=MultiHead.Config(bias=False))).build(DIM).double()
    with torch.no_grad():
        mixer.projection.query.weight.copy_(torch.eye(DIM))
        keys, values = mixer.projection.kv.weight.chunk(2)
        plain.projection.inner.qkv.weight.copy_(torch.cat([keys, keys, values]))
        plain.out.weight.copy_(mixer.out.weight)
        torch.testing.assert_close(outputs(mixer, x), outputs(plain, x), rtol=0, atol=1e-12)
        mixer.projection.query.weight.mul_(2)
        assert (outputs(mixer, x) - outputs(plain, x)).abs().max() > 1e-3


def test_norms_stand_before_attention_and_behind_the_feed_forward():
    model = kinformer.build("primer", recipe="tiny-whole", vocab_size=23).double()
    layer, x = model.stack.layers[0], torch.randn(1, 5, 32, dtype=torch.float64)
    assert isinstance(layer, DecoderLayer)
    kinds = type(layer.mixer_residual), type(layer.feed_forward_residual)
    assert kinds == (PreNorm, ResPostNorm)
    h = x + outputs(layer.mixer, layer.mixer_residual.norm(x))
    want = h + layer.feed_forward_residual.norm(layer.feed_forward(h))
    torch.testing.assert_close(outputs(layer, x), want, rtol=0, atol=1e-12)
    with pytest.raises(KinformerError, match="width must be 2 or more, but is 1"):
        SharedQK.Config(width=1)
