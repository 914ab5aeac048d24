"""RWKV's channel mixing: the contract, its formula, its limit, where it may stand."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.channel_mix import ChannelMix
from kinformer.runtime.errors import KinformerError
from kinformer.testing import verify_mixer

CONFIG = ChannelMix(hidden_dim=12)


def test_the_causal_one_keeps_the_contract():
    report = verify_mixer(lambda: CONFIG.build_causal(8), dim=8)
    assert report.skipped.keys() == {"implementations"} and "compile" in report.passed


def test_it_is_its_formula():
    torch.manual_seed(0)
    module = CONFIG.build_causal(8).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    before = torch.cat([torch.zeros(2, 1, 8), x[:, :-1]], 1)
    shifted = x + module.shift * (before - x)
    want = (shifted @ module.up.weight.T).relu() ** 2 @ module.down.weight.T
    got = module(Chunk(x), module.initial_state(2, dtype=x.dtype))[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_without_a_shift_it_is_a_feed_forward_of_each_token():
    module = CONFIG.build_causal(8)
    with torch.no_grad():
        module.shift.zero_()
    x = torch.randn(1, 5, 8)
    alone = torch.stack([module(Chunk(row[None, None]), module.initial_state(1))[0][0, 0] for row in x[0]])
    torch.testing.assert_close(module(Chunk(x), module.initial_state(1))[0][0], alone)


def test_it_stands_in_decoders_and_not_where_tokens_are_fed_alone():
    kinformer.build("gpt", recipe="tiny", set={"layers.*.feed_forward": "channel_mix"})
    for member in ("macaron", "bert"):
        with pytest.raises(KinformerError, match="'channel_mix' looks at the token before"):
            kinformer.build(member, recipe="tiny", set={"layers.*.feed_forward": "channel_mix"})
