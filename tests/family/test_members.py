"""The contract battery over the members and mixers of the family, and where they equal exact attention."""

import dataclasses
import subprocess
import sys

import pytest
import torch

import kinformer
from kinformer.core.config import from_dict, to_dict
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.parts import active_parameters
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.table import MEMBERS
from kinformer.lab.estimation.parts import outputs
from kinformer.mixers.buckets import LSHAttention, RoutingAttention
from kinformer.mixers.compressive import Compressive, Convolution, DilatedConvolution, MostUsed, Pool
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.memory import Memorizing, SegmentMemory, SingleHead
from kinformer.mixers.recurrent import LSTM
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.models.decoder import Decoder
from kinformer.models.encoder import Encoder
from kinformer.parts.decays import Softplus
from kinformer.parts.feature_maps import Dpfp, Elu, Quadratic, Relu, SumNormalised
from kinformer.parts.patterns.blocks import Image1D, Image2D, RandomBlocks
from kinformer.parts.patterns.sequence import (
    Causal,
    Columns,
    Dilated,
    Documents,
    Fixed,
    Full,
    GlobalTokens,
    Intersection,
    Local,
    PerHead,
    Strided,
    Union,
)
from kinformer.parts.projections import Complex, Convolved, Grouped, Normalised
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Rope, Shaw, TransformerXL
from kinformer.parts.scores import Additive, Bilinear, Dot, Modulus
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MODEL_CHECKS, MixerSubject, ModelSubject, SourceModelSubject, verify_config
from kinformer.testing.subject import GROWTHS
from tests.members import CAUSAL, ENCODERS, SOURCE, TRAJECTORIES, one_layer

from ..inputs.made import StepsSubject
from .values import values_of

DIM = 16
FAST_WEIGHT = LinearAttention.Config(
    num_heads=2, feature_map=SumNormalised.Config(), rule="delta", normaliser="none", scale=True, bias=False
)
MIXERS = {
    "softmax": SoftmaxAttention.Config(num_heads=2),
    "softmax, window": SoftmaxAttention.Config(num_heads=2, pattern=Local.Config(window=5)),
    "softmax, itself only": SoftmaxAttention.Config(num_heads=2, pattern=Local.Config(window=1)),
    "softmax, grouped": SoftmaxAttention.Config(num_heads=4, projection=Grouped.Config(num_kv_heads=2)),
    "softmax, normalised, rope, one key head": SoftmaxAttention.Config(
        num_heads=2, projection=Normalised.Config(inner=Grouped.Config()), position=Rope.Config()
    ),
    "softmax, normalised, convolved": SoftmaxAttention.Config(
        num_heads=2, projection=Normalised.Config(inner=Convolved.Config())
    ),
    "softmax, rope": SoftmaxAttention.Config(num_heads=2, position=Rope.Config()),
    "softmax, rope by YaRN of half the features": SoftmaxAttention.Config(
        num_heads=2, position=Rope.Config(fraction=0.5, scaling="yarn", factor=4.0, original_length=16)
    ),
    "softmax, rope of the paper, window, one key head": SoftmaxAttention.Config(
        num_heads=2,
        head_dim=6,
        bias=False,
        position=Rope.Config(layout="interleaved"),
        pattern=Local.Config(window=4),
        projection=Grouped.Config(bias=False),
    ),
    "softmax, shaw": SoftmaxAttention.Config(num_heads=2, position=Shaw.Config(max_distance=5)),
    "softmax, shaw, window, one key head": SoftmaxAttention.Config(
        num_heads=2,
        position=Shaw.Config(max_distance=3),
        pattern=Local.Config(window=7),
        projection=Grouped.Config(),
    ),
    "softmax, xl": SoftmaxAttention.Config(num_heads=2, position=TransformerXL.Config()),
    "softmax, xl, clamp, window, grouped": SoftmaxAttention.Config(
        num_heads=4,
        position=TransformerXL.Config(clamp=4),
        pattern=Local.Config(window=7),
        projection=Grouped.Config(num_kv_heads=2),
    ),
    "softmax, t5, dot": SoftmaxAttention.Config(
        num_heads=2, position=T5.Config(num_buckets=8, max_distance=12), score=Dot.Config()
    ),
    "softmax, alibi, three heads, window": SoftmaxAttention.Config(
        num_heads=3, head_dim=4, position=Alibi.Config(), pattern=Local.Config(window=6)
    ),
    "softmax, distance-aware": SoftmaxAttention.Config(num_heads=2, position=DistanceAware.Config()),
    "softmax, bilinear": SoftmaxAttention.Config(num_heads=2, score=Bilinear.Config()),
    "softmax, additive, alibi": SoftmaxAttention.Config(num_heads=2, score=Additive.Config(), position=Alibi.Config()),
    "softmax, modulus, window": SoftmaxAttention.Config(
        num_heads=2, score=Modulus.Config(), pattern=Local.Config(window=5)
    ),
    "softmax, complex": SoftmaxAttention.Config(num_heads=2, projection=Complex.Config(), score=Modulus.Config()),
    "softmax, complex, unshared, conjugate, window": SoftmaxAttention.Config(
        num_heads=2,
        head_dim=6,
        projection=Complex.Config(shared=False, bias=False),
        score=Modulus.Config(conjugate=True),
        pattern=Local.Config(window=6),
    ),
    "softmax, convolved": SoftmaxAttention.Config(num_heads=2, projection=Convolved.Config()),
    "softmax, convolved, itself only": SoftmaxAttention.Config(
        num_heads=2, projection=Convolved.Config(), pattern=Local.Config(window=1)
    ),
    "softmax, convolved, one key head, window, rope": SoftmaxAttention.Config(
        num_heads=2,
        projection=Convolved.Config(width=4, inner=Grouped.Config()),
        pattern=Local.Config(window=3),
        position=Rope.Config(),
    ),
    "softmax, strided, alibi": SoftmaxAttention.Config(num_heads=2, pattern=Strided(stride=5), position=Alibi.Config()),
    "softmax, fixed, slices": SoftmaxAttention.Config(
        num_heads=4,
        pattern=Fixed(segment=6, summary=1, slices=2, num_heads=4),
        projection=Grouped.Config(num_kv_heads=2),
    ),
    "softmax, fixed columns, some see nothing": SoftmaxAttention.Config(
        num_heads=2, pattern=Fixed(segment=6, summary=2, part="columns")
    ),
    "softmax, dilated per head, rope": SoftmaxAttention.Config(
        num_heads=2, pattern=Dilated.Config(window=3, dilations=(2, 3)), position=Rope.Config()
    ),
    "softmax, window and columns in two heads, shaw": SoftmaxAttention.Config(
        num_heads=2,
        pattern=PerHead.Config(patterns=(Local.Config(window=4), Columns.Config(stride=4))),
        position=Shaw.Config(max_distance=5),
    ),
    "softmax, image 1d, t5": SoftmaxAttention.Config(
        num_heads=2, pattern=Image1D(block=5), position=T5.Config(num_buckets=8, max_distance=12)
    ),
    "softmax, image 2d": SoftmaxAttention.Config(
        num_heads=2,
        pattern=Image2D.Config(height=4, width=6, block_height=2, block_width=3, flange_height=1, flange_width=2),
    ),
    "softmax, window, globals, random blocks, documents": SoftmaxAttention.Config(
        num_heads=2,
        pattern=Intersection(
            patterns=(
                Causal.Config(),
                Documents.Config(starts=(17,)),
                Union(
                    patterns=(
                        Local.Config(window=3),
                        GlobalTokens.Config(count=2),
                        RandomBlocks.Config(block=3, count=1, num_heads=2),
                    )
                ),
            )
        ),
    ),
    "segment memory": SegmentMemory.Config(num_heads=2, segment=6, memory=4),
    "segment memory, longer than a segment, rope, grouped": SegmentMemory.Config(
        num_heads=4, segment=7, memory=13, position=Rope.Config(), projection=Grouped.Config(num_kv_heads=2), bias=True
    ),
    "segment memory, none, clamp": SegmentMemory.Config(
        num_heads=2, head_dim=6, segment=7, memory=0, position=TransformerXL.Config(clamp=4)
    ),
    "segment memory, same length, clamp": SegmentMemory.Config(
        num_heads=2, segment=7, memory=11, same_length=True, position=TransformerXL.Config(clamp=3)
    ),
    "compressive": Compressive.Config(
        num_heads=2, segment=6, memory=4, compressed=3, compression=Convolution.Config(rate=2)
    ),
    "compressive, dilated, auto-encoding, rope, grouped": Compressive.Config(
        num_heads=4,
        segment=6,
        memory=9,
        compressed=4,
        compression=DilatedConvolution.Config(rate=3),
        loss="auto-encoding",
        position=Rope.Config(),
        projection=Grouped.Config(num_kv_heads=2),
    ),
    "compressive, most used, alibi": Compressive.Config(
        num_heads=2,
        segment=6,
        memory=6,
        compressed=3,
        compression=MostUsed.Config(rate=3),
        position=Alibi.Config(),
    ),
    "compressive, largest, no memory": Compressive.Config(
        num_heads=2, segment=6, memory=0, compressed=5, compression=Pool.Config(rate=2, take="max")
    ),
    "linear, elu": LinearAttention.Config(num_heads=2),
    "linear, relu": LinearAttention.Config(num_heads=2, feature_map=Relu.Config(), eps=0.1),
    "linear, dpfp": LinearAttention.Config(num_heads=2, feature_map=Dpfp.Config(nu=2), eps=0.1),
    "linear, quadratic": LinearAttention.Config(num_heads=2, head_dim=4, feature_map=Quadratic.Config(), bias=False),
    "fast weight, delta": FAST_WEIGHT,
    "fast weight, delta, decay, convolution": FAST_WEIGHT.replace(decay=Softplus.Config(), convolution=3, gate=True),
    "fast weight, delta, elu": FAST_WEIGHT.replace(feature_map=SumNormalised.Config(inner=Elu.Config())),
    "fast weight, sum": FAST_WEIGHT.replace(rule="linear"),
    "lsh": LSHAttention.Config(num_heads=2, num_buckets=2, chunk_size=2, rounds=2),
    "lsh, one bucket": LSHAttention.Config(num_heads=2, num_buckets=1, chunk_size=3, rounds=1, bias=True),
    "routing": RoutingAttention.Config(
        num_heads=3, head_dim=4, local_heads=1, num_clusters=3, window=4, commitment=0.1
    ),
    "routing, no local heads": RoutingAttention.Config(num_heads=2, local_heads=0, num_clusters=2, window=6),
    "lstm": LSTM.Config(),
    "memorizing": Memorizing.Config(num_heads=2, window=5, segment=8, memory_size=16, topk=4),
    "memorizing, exact, strictly before, t5": Memorizing.Config(
        num_heads=2,
        window=9,
        segment=8,
        memory_size=8,
        topk=3,
        search="exact",
        sees_itself=False,
        position=T5.Config(num_buckets=6, max_distance=7),
    ),
    "memorizing, no memory": Memorizing.Config(num_heads=2, window=5, memory_size=0),
    "single head": SingleHead.Config(memory=6),
    "single head, itself only": SingleHead.Config(memory=1),
}
COMPILED = (
    "softmax, window",
    "softmax, xl",
    "segment memory",
    "softmax, convolved",
    "linear, elu",
    "lsh",
    "fast weight, delta, decay, convolution",
)
"""A graph takes a second or two to make: one mixer per kernel is compiled here."""


TIME = 14
"""Tokens of a check. They cross a window of 8 once, and a past of 9 tokens before half of the checks once more."""
LONG = ("segment memory", "compressive", "memorizing", "softmax, image 2d", "softmax, window, globals")
"""How the names of mixers begin that need more tokens to fill their memories and patterns."""


def subject(name):
    config, time = MIXERS[name], 23 if name.startswith(LONG) else TIME
    impls = {"reference": lambda: config.replace(impl="reference").build(DIM)}
    return MixerSubject(lambda: config.build(DIM), dim=DIM, time=time, impls=impls)


LACKS = {
    ("compressive, most used, alibi", "gradcheck"): "a state's usage is a count, to which no gradient is owed",
}
"""What a mixer lacks, and why."""


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_keeps_the_contract(name, check):
    if (name, check) not in LACKS:
        CHECKS[check](subject(name))


@pytest.mark.parametrize("name", COMPILED)
def test_mixer_compiles(name):
    CHECKS["compile"](subject(name))


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_survives_a_file(name):
    verify_config(MIXERS[name], kinds(), dim=DIM)


DEEP = ("gpt", "t5", "rwkv7", "vanilla")
"""Plain layers, layers that share a table or the first one's values, and layers that read a source."""


@pytest.mark.parametrize("check", MODEL_CHECKS)
@pytest.mark.parametrize("member", CAUSAL + SOURCE + TRAJECTORIES)
def test_member_keeps_the_contract(member, check):
    config = configure(member, "tiny", 23 if member not in TRAJECTORIES else None)
    config = config if member in DEEP else one_layer(config)
    if member in TRAJECTORIES:
        subject = StepsSubject(config.build, time=TIME)
    else:
        subject = (SourceModelSubject if member in SOURCE else ModelSubject)(config.build, vocab_size=23, time=TIME)
    MODEL_CHECKS[check](subject)


@pytest.mark.parametrize("member", MEMBERS)
def test_every_recipe_builds_and_survives_a_file(member):
    for recipe in MEMBERS[member].recipes:
        config = configure(member, recipe)
        decodes = recipe.endswith("causal")  # of a member of encoders
        whole = not decodes and (recipe.endswith("encoder") or not MEMBERS[member].causal)
        assert isinstance(config, Encoder.Config if whole else Decoder.Config)
        assert from_dict(ModelConfig, to_dict(config), kinds()) == config
        with unallocated():
            model = config.build()
        growths = {mixer.growth for mixer in model.modules() if isinstance(mixer, CausalMixer)}
        if whole:
            assert not growths and (MEMBERS[member].growth == "none") != MEMBERS[member].causal
            continue
        declared = MEMBERS[member].growth  # a store is no part of the state, which grows as the decoder's own
        hybrid = recipe == "hybrid" or (member, recipe) == ("kda", "paper")
        linear = decodes or declared == "store" or hybrid  # a hybrid has layers of softmax or latent attention
        remembers = member == "tensorized" and recipe.endswith("memory")  # of a segment, rather than a whole text
        assert max(growths, key=GROWTHS.index) == ("window" if remembers else "linear" if linear else declared)
    assert {"tiny", "small", "benchmark", "paper"} <= MEMBERS[member].recipes.keys()


@pytest.mark.parametrize("member", [name for name in MEMBERS if name != "speech-lstm"])
def test_benchmark_recipe_has_the_shape_that_peers_are_timed_at(member):
    config = configure(member, "benchmark")
    assert (config.dim, len(config.uses)) == (256, 4)
    for layer in config.layers:
        if hasattr(layer.mixer, "num_heads"):
            assert (layer.mixer.num_heads, layer.mixer.head_dim or 256 // 4) == (4, 64)
        if layer.feed_forward.kind not in ("product_keys", "experts"):
            assert layer.feed_forward.hidden_dim == (
                512 if layer.kind == "macaron" else 1024
            )  # a Macaron layer has two


def test_small_recipes_have_one_budget():
    """Equal widths and depths: what the members' own mechanisms add stays within 13 % of the plain decoder. Attention
    to a source is added to that; of a mixture of experts counts what a token uses; shared keys save 12.4 %."""
    sizes = {}
    for name in CAUSAL + ENCODERS:
        with unallocated():
            layers = configure(name, "small").build().stack.layers
        used = active_parameters if name == "mixtral" else lambda module: sum(p.numel() for p in module.parameters())
        sizes[name] = used(layers)
    assert all(abs(size / sizes["gpt"] - 1) < 0.13 for size in sizes.values()), sizes


def test_table_is_free_of_torch():
    code = "import sys, kinformer.family.table as t; assert t.MEMBERS; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("member", MEMBERS)
def test_records_are_complete(member):
    record = MEMBERS[member]
    assert record.name == member
    for field in dataclasses.fields(record):
        if field.name not in ("axes", "causal", "needs", "parity", "results", "cost", "task", "layer", "training"):
            assert getattr(record, field.name), field.name
    assert str(record.year) in record.paper


def test_a_record_has_the_year_of_its_paper_or_is_refused():
    gpt = MEMBERS["gpt"]
    assert dataclasses.replace(gpt, year=0, paper="arXiv 2009.14794, of 2021").year == 2021
    with pytest.raises(KinformerError, match="the paper of the member 'gpt' does not have a year; give year"):
        dataclasses.replace(gpt, year=0, paper="arXiv 2009.14794")


def mixed(config, time=12, **options):
    """Outputs of a mixer with weights that depend on the config's shapes only."""
    torch.manual_seed(0)
    mixer = config.build(DIM).double()
    x = torch.randn(2, time, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))[0]


def test_window_of_the_whole_length_is_exact_attention():
    causal = SoftmaxAttention.Config(num_heads=2)
    exact = mixed(causal)
    for window in (12, 13, 1000):
        assert torch.equal(mixed(causal.replace(pattern=Local.Config(window=window))), exact)
    short = mixed(causal.replace(pattern=Local.Config(window=11)))
    assert torch.equal(short[:, :11], exact[:, :11])
    assert (short[:, 11] - exact[:, 11]).abs().max() > 1e-4


LIMITS = {
    "strided": (Strided(stride=11), Strided(stride=10)),
    "fixed": (Fixed(segment=12, summary=1), Fixed(segment=11, summary=1)),
    "dilated": (Dilated.Config(window=12, dilation=1), Dilated.Config(window=11, dilation=1)),
    "global tokens": tuple(
        Intersection(patterns=(Causal.Config(), GlobalTokens.Config(count=count))) for count in (12, 10)
    ),
    "image, 1d": (Image1D(block=6), Image1D(block=5)),
    "image, 2d": tuple(
        Image2D.Config(height=3, width=4, block_height=3, block_width=width, flange_height=0, flange_width=1)
        for width in (4, 2)
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_sparse_patterns_that_hold_the_whole_length_are_exact_attention(name):
    """And one step off the limit the outputs differ."""
    causal = SoftmaxAttention.Config(num_heads=2)
    exact = mixed(causal)
    whole, less = (mixed(causal.replace(pattern=pattern)) for pattern in LIMITS[name])
    assert (whole - exact).abs().max() < 1e-12
    assert (less - exact).abs().max() > 1e-4


def test_as_many_key_heads_as_heads_is_exact_attention():
    causal = SoftmaxAttention.Config(num_heads=2)
    exact = mixed(causal)
    assert torch.equal(mixed(causal.replace(projection=Grouped.Config(num_kv_heads=2))), exact)


def test_quadratic_features_are_the_squared_kernel_exactly():
    config = LinearAttention.Config(num_heads=1, feature_map=Quadratic.Config(c=0.5), bias=False, eps=1e-6)
    mixer = config.build(DIM).double()
    x = torch.randn(1, 20, DIM, dtype=torch.float64)
    q, k, v = mixer.qkv(x)[0].split(DIM, dim=-1)
    weights = ((q @ k.T + 0.5) ** 2).tril()
    want = mixer.out(weights @ v / (weights.sum(-1, keepdim=True) + 1e-6))
    got, _ = mixer(Chunk(x), mixer.initial_state(1, dtype=torch.float64))
    assert (got[0] - want).abs().max() < 1e-11


@pytest.mark.parametrize("member", MEMBERS)
def test_dropout_is_decided_by_the_seed(member):
    changes = {"dropout": 0.2, "layers.*.dropout": 0.2}
    if member == "gpt":
        changes["layers.*.mixer.dropout"] = 0.2
    model = kinformer.build(member, recipe="tiny", set=changes)
    values = values_of(model, 2, 30)

    def sample(seed):
        torch.manual_seed(seed)
        logits = outputs(model, values)[0]
        model.zero_grad()
        logits.square().sum().backward()
        return logits.detach(), next(each for each in model.parameters() if each.requires_grad).grad.clone()

    first, again, other = sample(1), sample(1), sample(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    model.eval()
    assert torch.equal(sample(1)[0], sample(2)[0])


def test_a_decoder_refuses_a_pattern_that_looks_ahead():
    with pytest.raises(KinformerError, match="'full' lets a token see later ones"):
        configure("gpt", "tiny", set={"layers.*.mixer.pattern": Full.Config()}).build()


def test_a_recipe_that_a_command_needs_and_a_member_lacks_is_said_with_what_to_add(monkeypatch):
    record = dataclasses.replace(MEMBERS["gpt"], name="bare", recipes={"small": MEMBERS["gpt"].recipes["small"]})
    monkeypatch.setitem(MEMBERS, "bare", record)
    for name in ("tiny", "benchmark"):
        with pytest.raises(
            KinformerError, match=rf"bare does not have the recipe '{name}' \(.*add it to the recipes of its"
        ):
            kinformer.build("bare", recipe=name)
