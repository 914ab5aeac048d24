"""Star-Transformer: the contract, its limit, and the numbers of its authors' code."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import leaky_relu, scaled_dot_product_attention

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.mixers.encoders import StarAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

SMALL = StarAttention.Config(num_heads=2)
MIXERS = {
    "ring": SMALL,
    "zeros": SMALL.replace(ends="zeros"),
    "tied, tokens alone": SMALL.replace(tied=True, iterations=3, add_relay=False),
    "one update": SMALL.replace(iterations=1, add_relay=False),
}


def made(config, dim=16):
    torch.manual_seed(0)
    return config.build(dim).double()


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in MIXERS for check in ENCODER_CHECKS if check != "compile" or name == "ring"],
)
def test_contract(name, check):
    impls = {"reference": lambda: MIXERS[name].replace(impl="reference").build(16)}
    subject = EncoderMixerSubject(lambda: MIXERS[name].build(16), impls=impls, num_globals=(0,), global_tokens=False)
    ENCODER_CHECKS[check](subject)


def dense(mixer, x, everybody=False):
    """Tokens and relay of one text [time, dim], all pairs at once, what a token may see written out as a mask;
    ``everybody``: every token sees every token, in exact attention."""
    time, s, e, h = len(x), x.mean(0, keepdim=True), x, x
    ring = torch.zeros(time, time, dtype=torch.bool)
    for i in range(time):
        ring[i, [(i - 1) % time, i, (i + 1) % time]] = True
    seen = torch.cat([ring | everybody, torch.eye(time, dtype=torch.bool), torch.ones(time, 1, dtype=torch.bool)], 1)
    for number in range(mixer.config.iterations):
        update = mixer.updates[number if len(mixer.updates) > 1 else 0]
        z = update.norm(h)
        h = leaky_relu(attended(update.ring, z, torch.cat([z, e, s]), seen))
        s = leaky_relu(attended(update.relay, s, torch.cat([s, h]), None))
    return h, s


def attended(products, queries, keys, mask):
    q, k, v = (
        product(x).unflatten(-1, (products.num_heads, -1)).transpose(0, 1)
        for product, x in ((products.query, queries), (products.key, keys), (products.value, keys))
    )
    return products.out(scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("time", [3, 4, 17])
def test_it_is_attention_under_its_mask_and_blind_to_padding(time):
    mixer, x = made(SMALL), torch.randn(1, 20, 16, dtype=torch.float64)
    nodes, relay = mixer.star(
        x.masked_fill(torch.arange(20)[:, None] >= time, torch.nan), torch.arange(20)[None] < time
    )
    want = dense(mixer, x[0, :time])
    torch.testing.assert_close(nodes[0, :time], want[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(relay[0], want[1], rtol=0, atol=1e-12)
    assert not nodes[0, time:].any()
    torch.testing.assert_close(mixer(x[:, :time])[0], (want[0] + want[1]) / 2, rtol=0, atol=1e-12)


def test_three_tokens_are_exact_attention_and_four_are_not():
    mixer, gaps = made(SMALL), []
    for time in (3, 4):
        x = torch.randn(1, time, 16, dtype=torch.float64)
        gaps.append(float((mixer.star(x, None)[0][0] - dense(mixer, x[0], everybody=True)[0]).detach().abs().max()))
    assert gaps[0] < 1e-12 and gaps[1] > 1e-4


def test_the_ring_closes_over_real_tokens():
    """With the first token changed, the last one's neighbour is another, in the update before any relay tells."""
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    other, valid = x.clone(), torch.arange(12)[None] < 9
    other[0, [0, 4]] = x[0, [4, 0]]  # the relay begins as the same mean
    for ends, moves in (("ring", True), ("zeros", False)):
        mixer = made(SMALL.replace(iterations=1, add_relay=False, ends=ends))
        gap = (mixer(other, SequenceContext(valid)) - mixer(x, SequenceContext(valid)))[0, 8].abs().max()
        assert bool(gap > 1e-6) == moves


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "star.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def authors(golden):
    """The mixer with their weights, and zeros beyond the ends."""
    config = SMALL.replace(num_heads=int(golden["heads"]), iterations=int(golden["iterations"]), ends="zeros")
    mixer, weights = made(config, golden["x"].shape[2]), {}
    for number in range(config.iterations):
        for kind in ("weight", "bias"):
            weights[f"updates.{number}.norm.{kind}"] = golden[f"w.norm.{number}.{kind}"]
            for own, theirs in (("ring", "ring_att"), ("relay", "star_att")):
                for name, letter in (("query", "Q"), ("key", "K"), ("value", "V"), ("out", "O")):
                    given = golden[f"w.{theirs}.{number}.W{letter}.{kind}"]
                    weights[f"updates.{number}.{own}.{name}.{kind}"] = given.flatten(1) if kind == "weight" else given
    mixer.load_state_dict(weights)
    return mixer


def test_it_computes_what_its_authors_code_does(golden):
    """fastNLP's StarTransformer, in float64: tokens, relay, and gradients of the inputs."""
    x = golden["x"].clone().requires_grad_()
    nodes, relay = authors(golden).star(x, None)
    ((nodes * golden["grad_nodes"]).sum() + (relay[:, 0] * golden["grad_relay"]).sum()).backward()
    torch.testing.assert_close(nodes, golden["nodes_nopad"], rtol=0, atol=1e-12)
    torch.testing.assert_close(relay[:, 0], golden["relay_nopad"], rtol=0, atol=1e-12)
    torch.testing.assert_close(x.grad, golden["grad_x"], rtol=0, atol=1e-12)


def test_padding_does_not_leak_as_it_does_in_their_code(golden):
    mixer, valid = authors(golden), golden["mask"]
    nodes, relay = mixer.star(golden["x"], valid)
    length = int(valid[1].sum())
    alone = mixer.star(golden["x"][1:, :length], None)
    torch.testing.assert_close(nodes[1:, :length], alone[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(relay[1:], alone[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(nodes[0], golden["nodes"][0], rtol=0, atol=1e-12)
    assert (relay[1, 0] - golden["relay"][1]).detach().abs().max() > 1e-3


def test_tied_updates_have_one_set_of_weights():
    sizes = [
        sum(parameter.numel() for parameter in made(SMALL.replace(iterations=n, tied=tied)).parameters())
        for n, tied in ((1, False), (3, True), (3, False))
    ]
    assert sizes[0] == sizes[1] and sizes[2] == 3 * sizes[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SMALL.replace(iterations=0), "iterations must be 1 or more, but is 0"),
        (lambda: SMALL.replace(iterations=1, tied=True), "tied = True does nothing with iterations = 1"),
        (lambda: made(SMALL.replace(impl="flex")), "knows no queries and keys without an order"),
        (lambda: kinformer.build("star", recipe="tiny", set={"global_tokens": 1}), "has a relay that sees all"),
        (lambda: kinformer.build("star", recipe="tiny", set={"global_input": "extra"}), "has a relay that sees all"),
    ],
)
def test_what_does_not_fit_is_one_sentence(make, message):
    with pytest.raises(KinformerError, match=message):
        make()
