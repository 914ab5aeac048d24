"""Linear attention over a whole text: the contract, its definition over all pairs, and Performer's limit."""

import pytest
import torch

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.mixers.encoders import BidirectionalLinear
from kinformer.parts.feature_maps import Favor, Identity, Relu
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

MIXERS = {
    "elu": BidirectionalLinear.Config(num_heads=2),
    "relu": BidirectionalLinear.Config(num_heads=2, feature_map=Relu.Config(), eps=0.1),
    "favor": BidirectionalLinear.Config(num_heads=2, feature_map=Favor.Config(features=9), eps=1e-30),
}


@pytest.mark.parametrize("check", [check for check in ENCODER_CHECKS if check not in ("compile", "implementations")])
@pytest.mark.parametrize("name", MIXERS)
def test_contract(name, check):
    ENCODER_CHECKS[check](EncoderMixerSubject(lambda: MIXERS[name].build(16)))


def test_compiles():
    ENCODER_CHECKS["compile"](EncoderMixerSubject(lambda: MIXERS["favor"].build(16), num_globals=(4,)))


def over_all_pairs(mixer, x, kernel):
    q, k, v = mixer.qkv(x)[0].view(x.shape[1], 3, 2, 8).permute(1, 2, 0, 3)
    weights = kernel(q, k)
    return mixer.out(((weights / weights.sum(-1, keepdim=True)) @ v).transpose(0, 1).flatten(1))


def test_it_is_its_definition_and_blind_to_padding():
    mixer = MIXERS["elu"].replace(eps=0.0).build(16).double()
    x = torch.randn(1, 30, 16, dtype=torch.float64)
    want = over_all_pairs(mixer, x[:, :21], lambda q, k: mixer.feature_map(q) @ mixer.feature_map(k).mT)
    got = mixer(x, SequenceContext(torch.arange(30)[None] < 21))
    assert (got[0, :21] - want).abs().max() < 1e-12 and not got[0, 21:].any()


def test_many_random_features_are_softmax_attention():
    errors = []
    for features in (16, 4096):
        torch.manual_seed(0)
        config = BidirectionalLinear.Config(num_heads=2, feature_map=Favor.Config(features=features), eps=1e-30)
        mixer, x = config.build(16).double(), torch.randn(1, 30, 16, dtype=torch.float64)
        with torch.no_grad():
            want = over_all_pairs(mixer, x, lambda q, k: (q @ k.mT / 8**0.5).exp())
            errors.append(float((mixer(x)[0] - want).norm() / want.norm()))
    assert errors[1] < 0.05 and 2 * errors[1] < errors[0]


@pytest.mark.parametrize("factor", [100.0, 10000.0])
def test_long_keys_are_safe(factor):
    mixer = MIXERS["favor"].build(16)
    assert mixer(factor * torch.randn(2, 30, 16)).isfinite().all()


def test_in_an_encoder_and_refused_features():
    model = kinformer.build("bert", recipe="tiny", vocab_size=61, set={"layers.*.mixer": "linear"})
    assert model(torch.randint(61, (2, 9))).shape == (2, 9, 61)
    with pytest.raises(KinformerError, match="the feature map 'identity' has products of either sign"):
        BidirectionalLinear.Config(feature_map=Identity.Config()).build(16)
