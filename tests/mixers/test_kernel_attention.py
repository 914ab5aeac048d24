"""Kernel attention = feature map x rule x decay x normaliser x convolution: all keep the contract or are refused.

A sample of the whole product goes through the battery's laws of time; each published mixer through all of it.
"""

import contextlib
import itertools
import random
from functools import cache

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.family.kinds import kinds
from kinformer.mixers.linear import LinearAttention
from kinformer.parts.decays import Fixed, LowRank, Sigmoid, Softplus, SoftplusChannels
from kinformer.parts.feature_maps import Dpfp, Elu, Favor, Identity, Quadratic, RandomFourier, SumNormalised, Unit
from kinformer.parts.relative_positions import Alibi, Rope
from kinformer.runtime.compiling import unallocated
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
    "fast weights, attention normalised": LinearAttention.Config(
        num_heads=2, feature_map=SumNormalised.Config(inner=Elu.Config()), rule="delta", normaliser="attention",
        scale=True, bias=False,
    ),
    "retnet": LinearAttention.Config(
        num_heads=2, value_dim=6, feature_map=Identity.Config(), decay=Fixed.Config(first=2.0), normaliser="none",
        scale=True, position=Rope.Config(layout="interleaved"), head_norm="layer", gate=True, bias=False,
    ),
    "gated deltanet": LinearAttention.Config(
        num_heads=2, value_dim=3, feature_map=Unit.Config(), rule="delta", decay=Softplus.Config(), normaliser="none",
        scale=True, convolution=4, head_norm="rms", gate=True, bias=False,
    ),
    "kda": LinearAttention.Config(
        num_heads=2, feature_map=Unit.Config(), rule="delta", decay=SoftplusChannels.Config(rank=3), normaliser="none",
        scale=True, convolution=4, head_norm="rms", gate=True, gate_rank=3, gate_activation="sigmoid", bias=False,
    ),
    "comba, two heads to a key head": LinearAttention.Config(
        num_heads=4, key_heads=2, value_dim=3, feature_map=Unit.Config(), rule="comba", decay=Softplus.Config(),
        normaliser="none", scale=True, convolution=2, head_norm="rms", gate=True, gate_activation="sigmoid", bias=False,
    ),
    "gated deltanet-2, two heads to a key head": LinearAttention.Config(
        num_heads=4, key_heads=2, value_dim=3, feature_map=Unit.Config(), rule="gdn2", negative_eigenvalues=True,
        decay=SoftplusChannels.Config(rank=3), normaliser="none", scale=True, convolution=2, head_norm="rms", gate=True,
        gate_rank=3, gate_activation="sigmoid", bias=False,
    ),
    "mesanet": LinearAttention.Config(
        num_heads=2, value_dim=3, feature_map=Unit.Config(), rule="mesa", iterations=8, normaliser="none",
        decay=Sigmoid.Config(coupled=False), convolution=2, head_norm="rms", gate=True, bias=False,
    ),
    "gated deltaproduct, two heads to a key head": LinearAttention.Config(
        num_heads=4, key_heads=2, value_dim=3, feature_map=Unit.Config(), rule="delta", steps=3,
        negative_eigenvalues=True, decay=Softplus.Config(), normaliser="none", scale=True, convolution=2,
        head_norm="rms", gate=True, bias=False,
    ),
    "mamba-2, two groups": LinearAttention.Config(
        num_heads=4, head_dim=3, value_dim=2, key_heads=2, feature_map=Identity.Config(),
        decay=Softplus.Config(coupled=True), normaliser="none", convolution=4, skip=True, head_norm="rms_group",
        gate=True, gate_first=True, bias=False,
    ),
    "rfa, gates that begin nearly open": LinearAttention.Config(
        num_heads=2, feature_map=RandomFourier.Config(features=12), decay=Sigmoid.Config(temperature=16.0), floor=1e-2
    ),
    "log-linear mamba-2": LinearAttention.Config(
        num_heads=4, head_dim=3, value_dim=2, key_heads=2, feature_map=Identity.Config(), levels=3,
        decay=Softplus.Config(coupled=True), normaliser="none", convolution=4, skip=True, head_norm="rms_group",
        gate=True, gate_first=True, bias=False,
    ),
    "performer, one key head, rope": LinearAttention.Config(
        num_heads=2, head_dim=4, key_heads=1, feature_map=Favor.Config(features=5), position=Rope.Config(),
        decay=SoftplusChannels.Config(rank=2, lower_bound=-2.0), eps=1e-30,
    ),
    "gla": LinearAttention.Config(
        num_heads=2, head_dim=2, value_dim=4, feature_map=Identity.Config(), decay=LowRank.Config(rank=3),
        normaliser="none", scale=True, head_norm="rms", gate=True, bias=False,
    ),
    "rfa": LinearAttention.Config(
        num_heads=2, feature_map=RandomFourier.Config(features=12), decay=Sigmoid.Config(), floor=1e-2
    ),
}  # fmt: skip
DELTA = {"rule": "delta", "normaliser": "none", "feature_map": Unit.Config()}
PARTS = {
    "feature_map": (
        Elu.Config(), Identity.Config(), Unit.Config(), SumNormalised.Config(inner=Dpfp.Config(nu=2)),
        Unit.Config(inner=Favor.Config(features=4, form="trigonometric")),
        Favor.Config(features=4), RandomFourier.Config(features=3, form="arccos"),
    ),
    "rule": ("linear", "delta"),
    "decay": (None, Fixed.Config(first=1.0), Sigmoid.Config(), Sigmoid.Config(coupled=False), Softplus.Config(),
              LowRank.Config(rank=2)),
    "normaliser": ("sum", "attention", "none"),
    "convolution": (0, 2, 4),
    "value_dim": (None, 3),
}  # fmt: skip


def subject(config, time=23):
    reference = config.replace(impl="reference")
    return MixerSubject(
        lambda: config.build(DIM), dim=DIM, time=time, impls={"reference": lambda: reference.build(DIM)}
    )


LACKS = {("performer, sines", "half_precision")}
"""Half-precision rounding moves large tokens by a large part of a sine's period."""


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mixers_keep_the_contract(name, check):
    if (name, check) in LACKS:
        pytest.skip("see LACKS")
    CHECKS[check](subject(PUBLISHED[name]))


@pytest.mark.parametrize("name", ["performer", "mesanet"])
def test_published_mixers_compile(name):
    """The others' parts compile in tests/kernels and tests/family."""
    config = PUBLISHED[name]
    CHECKS["compile"](subject(config.replace(iterations=1) if name == "mesanet" else config))


@cache
def product():
    """Every combination, in a random order; those that are built, and the sentences of the others."""
    every = list(itertools.product(*PARTS.values()))
    random.Random(0).shuffle(every)
    built, refused = [], set()
    for values in every:
        try:
            config = LinearAttention.Config(num_heads=2, **dict(zip(PARTS, values, strict=True)))
            with unallocated():
                config.build(DIM)
            built.append(config)
        except KinformerError as error:
            refused.add(str(error))
    return built, refused


@pytest.mark.parametrize("number", range(16))
def test_a_sample_of_the_product_keeps_the_laws_of_time(number):
    law = ("partition", "ragged_reset", "causality", "gradcheck")[number % 4]
    CHECKS[law](subject(product()[0][number], time=13))


def test_what_is_refused():
    """Each for one of five reasons, which say what to do."""
    built, refused = product()
    assert (len(built), len(refused)) == (468, 15)
    reasons = (
        "is not for rule = ",
        "does nothing with normaliser = 'attention'",
        "whose sum may vanish",
        "known up to a factor only",
        "but rule = 'delta' has",
    )
    reasons += ("gives keys of any length",)
    assert all(any(reason in sentence for reason in reasons) and sentence.endswith(".") for sentence in refused)


def test_a_bias_of_the_convolution_stays_in_the_precision_of_autocast():
    mixer, widths = LinearAttention.Config(num_heads=2, convolution=3, convolution_bias=True).build(DIM), []
    mixer.convolution.register_forward_hook(lambda _, args, outputs: widths.append(outputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        mixer(Chunk(torch.randn(1, 4, DIM)), mixer.initial_state(1))
    assert widths == [torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"convolution": 1}, "convolution must be 2 or more, or 0 for none, but is 1"),
        ({"key_heads": 3}, "key_heads = 3 must divide num_heads = 2"),
        ({"steps": 2}, "steps = 2 does nothing with rule = 'linear'"),
        ({**DELTA, "iterations": 2}, "iterations = 2 does nothing with rule = 'delta'"),
        ({**DELTA, "rule": "mesa", "decay": LowRank.Config(rank=2)}, "rule = 'mesa' has no .* decay by channel"),
        ({**DELTA, "rule": "comba", "steps": 2}, "steps = 2 does nothing with rule = 'comba'"),
        ({**DELTA, "rule": "gdn2", "normaliser": "attention"}, "normaliser = 'attention' is not for rule = 'gdn2'"),
        ({**DELTA, "rule": "gdn2", "feature_map": Elu.Config()}, "with which rule = 'gdn2' diverges"),
        ({**DELTA, "rule": "comba", "impl": "triton"}, "rule = 'comba' has no Triton kernel"),
        ({**DELTA, "rule": "comba", "decay": LowRank.Config(rank=2)}, "rule = 'comba' has no .* decay by channel"),
        ({"gate_rank": 2}, "gate_rank = 2 does nothing without a gate"),
        ({"levels": 4}, "levels = 4 must be 1 or more of rule = 'linear' with normaliser = 'none'"),
        ({**DELTA, "levels": 4}, "levels = 4 must be 1 or more of rule = 'linear' with normaliser = 'none'"),
        ({"normaliser": "none", "levels": -1}, "levels = -1 must be 1 or more"),
        ({"normaliser": "none", "levels": 4, "decay": LowRank.Config(rank=2)}, "no decay by channel"),
        ({"normaliser": "none", "levels": 4, "impl": "triton"}, "levels have no Triton kernel"),
        ({"gate": True, "gate_first": True}, "gate_first = True does nothing with head_norm = 'none'"),
        ({**DELTA, "steps": 0}, "steps must be 1 or more, but is 0"),
        ({**DELTA, "steps": 2, "position": Rope.Config()}, "the position 'rope' turns one key a token"),
        ({**DELTA, "steps": 2, "skip": True}, "skip adds one value a token"),
        ({**DELTA, "decay": Softplus.Config(coupled=True)}, "a coupled decay weighs the keys of sums"),
        ({"position": Alibi.Config()}, "the position 'alibi' does not act by turning queries and keys"),
        ({"normaliser": "none", "eps": 0.1}, "eps = 0.1 does nothing with normaliser = 'none'"),
        *(
            ({"feature_map": SumNormalised.Config(inner=inner)}, "divides by a sum, which may vanish")
            for inner in (
                Identity.Config(),
                Quadratic.Config(),
                RandomFourier.Config(),
                Favor.Config(form="trigonometric"),
            )
        ),
    ],
)
def test_other_refusals(changes, sentence):
    with pytest.raises(KinformerError, match=sentence):
        LinearAttention.Config(num_heads=2, **changes).build(DIM)


MAPS = {
    **{name: kind() for name, kind in kinds()["feature_map"].items()},
    "favor, sines": Favor.Config(form="trigonometric"),
    "favor, relu": Favor.Config(form="relu"),
    "arccos": RandomFourier.Config(form="arccos"),
}


def nested():
    """All maps, as they are and normed, of which those remain that can be built."""
    for name, config in MAPS.items():
        yield name, config
        for norm in (Unit.Config, SumNormalised.Config):
            with contextlib.suppress(KinformerError):
                norm(inner=config).build_heads(2, 4)
                yield f"{name} in {norm.kind}", norm(inner=config)


NESTED = dict(nested())


@pytest.mark.parametrize("name", NESTED)
def test_the_delta_rule_takes_the_maps_with_which_it_is_stable(name):
    """Weights ten times the usual ones, float32: no key is longer than 1, and the state stays small; all other maps are
    refused."""
    torch.manual_seed(0)
    feature_map = NESTED[name].build_heads(2, 4)
    config = LinearAttention.Config(num_heads=2, feature_map=NESTED[name], rule="delta", normaliser="none")
    if not feature_map.bounded:
        with pytest.raises(KinformerError, match="gives keys of any length|up to a factor"):
            config.build(DIM)
        return
    for scale in (1e-3, 1.0, 1e3):
        keys, lacking = feature_map.keys(scale * torch.randn(1, 2, 50, 4))
        assert lacking is None and keys.norm(dim=-1).max() < 1 + 1e-6
    mixer = config.build(DIM)
    with torch.no_grad():
        mixer.qkv.weight.mul_(10)
        y, state = mixer(Chunk(torch.randn(1, 1024, DIM)), mixer.initial_state(1))
    assert y.isfinite().all() and state.kv.abs().max() < 100


@pytest.mark.parametrize("form", ["positive", "trigonometric"])
def test_normed_random_features_do_not_know_the_factor_that_they_lack(form):
    torch.manual_seed(0)
    inner = Favor.Config(features=6, form=form, **({"eps": 0.0} if form == "positive" else {}))
    mixed_ = Unit.Config(inner=inner, eps=0.0).build(4).double()
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    u, square = x / 4**0.25 @ mixed_.inner.weight.mT, x.square().sum(-1, keepdim=True) / (2 * 4**0.5)
    whole = (u - square).exp() if form == "positive" else square.exp() * torch.cat([u.sin(), u.cos()], -1)
    for features in (mixed_.queries(x), mixed_.keys(x)[0]):
        torch.testing.assert_close(features, whole / whole.norm(dim=-1, keepdim=True), rtol=1e-14, atol=1e-14)
    if form == "positive":
        summed = SumNormalised.Config(inner=inner, eps=0.0).build(4).double()
        summed.load_state_dict(mixed_.state_dict())
        torch.testing.assert_close(summed.keys(x)[0], whole / whole.sum(-1, keepdim=True), rtol=1e-14, atol=1e-14)


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


def test_a_gates_temperature_is_the_root_of_its_decays_and_without_end_there_is_none():
    """exp(log a / temperature); far above all numbers of a gate, nothing of the past is lost."""
    x, built = torch.randn(2, 5, DIM, dtype=torch.float64), {}
    for temperature in (1.0, 16.0, 1e300):
        torch.manual_seed(0)
        built[temperature] = Sigmoid.Config(temperature=temperature).build(DIM, 2, 4).double()(x).exp()
    torch.testing.assert_close(built[16.0] ** 16, built[1.0], rtol=1e-12, atol=0)
    assert (built[1e300] == 1).all() and not (built[1.0] == 1).any()
