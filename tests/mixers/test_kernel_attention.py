"""Kernel attention = feature map x rule x decay x normaliser x convolution: all keep the contract or are refused.

A sample of the whole product goes through the battery's laws of time; each published mixer through all of it.
"""

import itertools
import random

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.decays.fixed import Fixed
from kinformer.decays.low_rank import LowRank
from kinformer.decays.sigmoid import Sigmoid
from kinformer.decays.softplus import Softplus
from kinformer.features.dpfp import Dpfp
from kinformer.features.elu import Elu
from kinformer.features.favor import Favor
from kinformer.features.identity import Identity
from kinformer.features.random_fourier import RandomFourier
from kinformer.features.sum_normalised import SumNormalised
from kinformer.features.unit import Unit
from kinformer.mixers.linear import LinearAttention
from kinformer.positions.alibi import Alibi
from kinformer.positions.rope import Rope
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

DIM = 8
PUBLISHED = {
    "performer": LinearAttention.Config(num_heads=2, feature_map=Favor.Config(features=6), eps=1e-30),
    "performer, sines": LinearAttention.Config(
        num_heads=2, feature_map=Favor.Config(features=40, form="trigonometric"), floor=1e-3
    ),
    "performer, relu": LinearAttention.Config(
        num_heads=2, feature_map=Favor.Config(features=5, form="relu", orthogonal=False, eps=1e-3)
    ),
    "relu of random features, of length 1": LinearAttention.Config(
        num_heads=2, feature_map=Unit.Config(inner=Favor.Config(features=5, form="relu")), rule="delta",
        normaliser="none",
    ),
    "retnet": LinearAttention.Config(
        num_heads=2, value_dim=6, feature_map=Identity.Config(), decay=Fixed.Config(first=2.0), normaliser="none",
        scale=True, position=Rope.Config(layout="interleaved"), head_norm="layer", gate=True, bias=False,
    ),
    "gated deltanet": LinearAttention.Config(
        num_heads=2, value_dim=3, feature_map=Unit.Config(), rule="delta", decay=Softplus.Config(), normaliser="none",
        scale=True, convolution=4, head_norm="rms", gate=True, bias=False,
    ),
    "gla": LinearAttention.Config(
        num_heads=2, head_dim=2, value_dim=4, feature_map=Identity.Config(), decay=LowRank.Config(rank=3),
        normaliser="none", scale=True, head_norm="rms", gate=True, bias=False,
    ),
    "rfa": LinearAttention.Config(
        num_heads=2, feature_map=RandomFourier.Config(features=12), decay=Sigmoid.Config(), floor=1e-2
    ),
}  # fmt: skip
PARTS = {
    "feature_map": (
        Elu.Config(), Identity.Config(), Unit.Config(), SumNormalised.Config(inner=Dpfp.Config(nu=2)),
        Favor.Config(features=4), RandomFourier.Config(features=3, form="arccos"),
    ),
    "rule": ("linear", "delta"),
    "decay": (None, Fixed.Config(first=1.0), Sigmoid.Config(), Sigmoid.Config(coupled=False), Softplus.Config(),
              LowRank.Config(rank=2)),
    "normaliser": ("sum", "none"),
    "convolution": (0, 2, 4),
    "value_dim": (None, 3),
}  # fmt: skip


def subject(config, time=23):
    reference = config.replace(impl="reference")
    return MixerSubject(
        lambda: config.build(DIM), dim=DIM, time=time, impls={"reference": lambda: reference.build(DIM)}
    )


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mixers_keep_the_contract(name, check):
    CHECKS[check](subject(PUBLISHED[name]))


def test_performers_compile():
    """The others' parts compile in tests/kernels and tests/family."""
    CHECKS["compile"](subject(PUBLISHED["performer"]))


def product():
    """Every combination, in a random order; those that are built, and the sentences of the others."""
    every = list(itertools.product(*PARTS.values()))
    random.Random(0).shuffle(every)
    built, refused = [], set()
    for values in every:
        try:
            config = LinearAttention.Config(num_heads=2, **dict(zip(PARTS, values, strict=True)))
            config.build(DIM)
            built.append(config)
        except KinformerError as error:
            refused.add(str(error))
    return built, refused


BUILT, REFUSED = product()


@pytest.mark.parametrize("number", range(16))
def test_a_sample_of_the_product_keeps_the_laws_of_time(number):
    law = ("partition", "ragged_reset", "causality", "gradcheck")[number % 4]
    CHECKS[law](subject(BUILT[number], time=13))


def test_what_is_refused():
    """Each for one of four reasons, which say what to do."""
    assert (len(BUILT), len(REFUSED)) == (474, 5)
    reasons = ("is for rule = 'linear'", "whose sum may vanish", "known up to a factor only", "but rule = 'delta' has")
    assert all(any(reason in sentence for reason in reasons) and sentence.endswith(".") for sentence in REFUSED)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"convolution": 1}, "convolution must be 2 or more, or 0 for none, but is 1"),
        ({"position": Alibi.Config()}, "the position 'alibi' does not act by turning queries and keys"),
        ({"normaliser": "none", "eps": 0.1}, "eps = 0.1 does nothing with normaliser = 'none'"),
        ({"feature_map": Unit.Config(inner=Favor.Config())}, "the feature map 'unit' norms features, but those of"),
        ({"feature_map": SumNormalised.Config(inner=Identity.Config())}, "divides by a sum, which may vanish"),
    ],
)
def test_other_refusals(changes, sentence):
    with pytest.raises(KinformerError, match=sentence):
        LinearAttention.Config(num_heads=2, **changes).build(DIM)


def mixed(mixer, x, **masks):
    with torch.no_grad():
        return mixer(Chunk(x, **masks), mixer.initial_state(len(x), dtype=x.dtype))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("name", ["performer", "performer, sines"])
def test_random_features_are_safe_and_blind_to_the_future_at_every_scale(name, factor):
    """Keys 100 times as long; a later key a thousand times as long as all others changes nothing before it, not even
    the last bit; float32 gives what float64 does."""
    torch.manual_seed(0)
    mixer = PUBLISHED[name].build(DIM)
    with torch.no_grad():
        mixer.qkv.weight[:16] *= factor * 8
    x = torch.randn(2, 90, DIM)
    y, state = mixed(mixer, x)
    assert y.isfinite().all() and all(leaf.isfinite().all() for leaf in state)
    slope = torch.autograd.grad(mixer(Chunk(x), mixer.initial_state(2))[0].square().sum(), mixer.qkv.weight)[0]
    assert slope.isfinite().all()
    disturbed = torch.cat([x[:, :70], 1000 * x[:, 70:]], dim=1)
    later, _ = mixed(mixer, disturbed)
    assert later.isfinite().all()
    assert torch.equal(later[:, :70], y[:, :70])
    if factor <= 1:
        wide, _ = mixed(mixer.double(), x.double())
        assert (wide - y).abs().max() < 1e-3 * wide.abs().max()
