"""RWKV's channel mixing: the contract, its formula, its limit, where it may stand."""

from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.convolutions import ChannelMix
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


def test_parity_with_flash_linear_attention():
    """RWKV7FeedForward of fla 0.6.0, its own kernels in float32 (``golden/make_rwkv7_layers.py``)."""
    with np.load(Path(__file__).parents[1] / "golden" / "rwkv7_layers.npz", allow_pickle=False) as arrays:
        golden = {name: torch.from_numpy(arrays[name]) for name in arrays}
    module = CONFIG.build_causal(8)
    names = {"shift": "x_k", "up.weight": "key.weight", "down.weight": "value.weight"}
    module.load_state_dict({ours: golden[f"ffn/{theirs}"] for ours, theirs in names.items()})
    found = module(Chunk(golden["x"]), module.initial_state(2))[0]
    torch.testing.assert_close(found, golden["c"], rtol=1e-5, atol=1e-5)


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
