"""The separable convolution as a feed-forward: the contract, a plain reference, its limit, where it may stand."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.blocks.feed_forward import ProductKeys
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.family.build import configure
from kinformer.lab.datastore.keys import KeyedDecoder
from kinformer.mixers.convolutions import SeparableTransition
from kinformer.runtime.errors import KinformerError
from kinformer.testing import (
    ENCODER_CHECKS,
    ENCODER_MODEL_CHECKS,
    MODEL_CHECKS,
    EncoderMixerSubject,
    EncoderModelSubject,
    ModelSubject,
    verify_mixer,
)

CONFIG = SeparableTransition(hidden_dim=12)


def test_the_causal_one_keeps_the_contract():
    report = verify_mixer(lambda: CONFIG.build_causal(8), dim=8)
    assert report.skipped.keys() == {"implementations"} and "compile" in report.passed


@pytest.mark.parametrize("check", ENCODER_CHECKS)
def test_the_two_sided_one_keeps_the_contract(check):
    ENCODER_CHECKS[check](EncoderMixerSubject(lambda: CONFIG.build(16), num_globals=(0,)))


@pytest.mark.parametrize("kernels", [(3, 5), (1, 7)])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_two_depthwise_and_two_pointwise_convolutions(causal, kernels):
    """As PyTorch's convolutions compute it, with zeros on the left or on both sides."""
    config = CONFIG.replace(first_kernel=kernels[0], second_kernel=kernels[1])
    module = (config.build_causal(8) if causal else config.build(8)).double()
    x = torch.randn(2, 11, 8, dtype=torch.float64)

    def convolved(x, convolution):
        weight = convolution.weight.flip(0).permute(2, 1, 0)
        before = len(convolution.weight) - 1 if causal else (len(convolution.weight) - 1) // 2
        padded = functional.pad(x.mT, (before, len(convolution.weight) - 1 - before))
        return functional.conv1d(padded, weight, groups=x.shape[-1]).mT

    want = module.down(convolved(module.up(convolved(x, module.first)).relu(), module.second))
    got = module(Chunk(x), module.initial_state(2))[0] if causal else module(x)
    assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("own", [1.0, 0.9])
def test_with_kernels_of_one_token_it_is_a_feed_forward(own):
    module = CONFIG.replace(first_kernel=1, second_kernel=1).build_causal(8)
    for convolution in (module.first, module.second):
        convolution.weight.data.fill_(own)
    x = torch.randn(2, 5, 8)
    want = module.down(module.up(x).relu())
    got = module(Chunk(x), module.initial_state(2))[0]
    assert torch.allclose(got, want, atol=1e-6) == (own == 1)


MODELS = {
    "halting": ("universal", "tiny-convolution", {}),
    "a plain stack": ("gpt", "tiny", {"layers.*.feed_forward": CONFIG}),
    "reversible": ("gpt", "tiny", {"layers.*.feed_forward": CONFIG, "stack": "reversible", "head.tied": False}),
    "exits": ("calm", "tiny", {"layers.*.feed_forward": CONFIG, "stack.rule.thresholds": [0.2]}),
}


@pytest.mark.parametrize("check", ["partition", "ragged_reset", "reserved"])
@pytest.mark.parametrize("name", MODELS)
def test_stacks_of_decoders_take_it(name, check):
    member, recipe, changes = MODELS[name]
    MODEL_CHECKS[check](ModelSubject(configure(member, recipe, 23, changes).build, vocab_size=23, time=13))


def test_an_encoder_takes_it():
    config = configure("universal", "tiny-encoder", 61, {"layers.*.feed_forward": CONFIG})
    for check in ("padding", "rows"):
        ENCODER_MODEL_CHECKS[check](EncoderModelSubject(config.build, 61, time=17))


def test_padding_in_a_text_is_no_neighbour():
    module, x = CONFIG.build(8), torch.randn(1, 6, 8)
    valid = torch.arange(6)[None] < 4
    padded = torch.where(valid[..., None], x, torch.nan)
    assert torch.allclose(module(padded, SequenceContext(valid))[:, :4], module(x[:, :4]), atol=1e-6)


def test_keys_of_a_datastore_are_what_enters_it():
    model = kinformer.build("gpt", recipe="tiny", vocab_size=23, set={"layers.*.feed_forward": CONFIG}).eval()
    keyed, _ = KeyedDecoder(model)(torch.randint(23, (2, 5)))
    assert keyed.keys.shape == (2, 5, 32) and not torch.equal(keyed.keys, keyed.hidden_states)


@pytest.mark.parametrize(
    ("member", "changes", "told"),
    [
        ("macaron", {"layers.*.feed_forward": CONFIG}, "'separable_convolution' reads other tokens"),
        ("sha-rnn", {"layers.*.feed_forward": CONFIG}, "'separable_convolution' reads other tokens"),
        ("etc", {"layers.*.feed_forward": CONFIG}, "of neighbours, and a global input has none"),
        ("gpt", {"layers.*.feed_forward": {"kind": "separable_convolution", "first_kernel": 4}}, "an odd number of 1"),
    ],
)
def test_refusals(member, changes, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.build(member, recipe="tiny", set=changes)


def test_other_feed_forwards_are_the_same_in_decoders():
    assert isinstance(ProductKeys.Config(num_keys=8).build_causal(8), ProductKeys)
