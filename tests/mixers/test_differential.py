"""Differential attention: DiffLlama's module, its limits, its contract, and what it refuses."""

import math

import pytest
import torch
from transformers.models.diffllama import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

from kinformer.core.contract import Chunk
from kinformer.core.probe import NoWeights, weights_of
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Local, Sinks
from kinformer.parts.projections import Grouped, MultiHead
from kinformer.parts.relative_positions import Rope, Shaw
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

HEADS, TIME = 4, 13


def outputs(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))[0]


def test_parity_with_diffllama():
    layer = 2
    settings = DiffLlamaConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=8, attention_bias=False,
        attn_implementation="eager", rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = DiffLlamaAttention(settings, layer).double().eval()
    mixer = built(
        SoftmaxAttention.Config(
            num_heads=HEADS, head_dim=8, differential=0.8 - 0.6 * math.exp(-0.3 * layer), bias=False,
            position=Rope.Config(), projection=Grouped.Config(num_kv_heads=2, bias=False),
        )
    )  # fmt: skip
    with torch.no_grad():
        rows = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
        mixer.projection.qkv.weight.copy_(torch.cat(rows))
        mixer.out.weight.copy_(theirs.o_proj.weight)
        vectors = [theirs.lambda_q1, theirs.lambda_k1, theirs.lambda_q2, theirs.lambda_k2]
        mixer.differential.vectors.copy_(torch.stack(vectors))
    x, rotary = inputs(TIME), DiffLlamaRotaryEmbedding(settings)
    mask = torch.full((TIME, TIME), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = theirs(x, rotary(x, torch.arange(TIME)[None]), mask)
    for impl in ("auto", "chunked", "sdpa", "reference"):
        mixer.impl = impl
        assert (outputs(mixer, x) - want).abs().max() < 1e-6  # their angles are float32
    assert want.abs().max() > 1e-2


@pytest.mark.parametrize("pattern", [Local.Config(window=4), Sinks.Config(count=2, window=4)])
def test_contract(pattern):
    config = SoftmaxAttention.Config(differential=0.3, pattern=pattern, position=Rope.Config())
    impls = {impl: lambda impl=impl: config.replace(impl=impl).build(DIM) for impl in ("reference", "chunked")}
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2, impls=impls)
    checks = ["causality", "partition", "padding", "reset", "reserved", "state_size", "implementations"]
    for check in checks + ["gradcheck", "compile"] * isinstance(pattern, Local.Config):
        CHECKS[check](subject)


def test_with_lam_0_the_first_heads_alone_are_read_and_with_any_other_they_are_not():
    """The exact limit: softmax attention of half the heads over pairs of values, each normed."""
    mixer, x = built(SoftmaxAttention.Config(differential=0.0)), inputs(TIME)
    with torch.no_grad():
        mixer.differential.vectors.zero_()  # exp(0) - exp(0) + 0
        q, k, v = mixer.projection(x)
        hidden = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
        weights = (0.5 * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)[:, :2]
        y = weights @ torch.cat([v[:, :2], v[:, 2:]], -1)
        want = mixer.out((y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).transpose(1, 2).flatten(2))
        assert (outputs(mixer, x) - want).abs().max() < 1e-12
        mixer.differential.vectors[:2] = 0.1
        assert (outputs(mixer, x) - want).abs().max() > 1e-4


def test_what_does_not_pair_is_refused():
    for settings, message in (
        ({"num_heads": 1}, "make both numbers even"),
        ({"projection": Grouped.Config(num_kv_heads=1)}, "make both numbers even"),
        ({"position": Shaw.Config()}, "values by distance"),
        ({"differential": 1.0}, "from 0 to below 1"),
    ):
        with pytest.raises(KinformerError, match=message):
            SoftmaxAttention.Config(**{"differential": 0.5, **settings}).build(DIM)
    mixer = SoftmaxAttention.Config(differential=0.5, projection=MultiHead.Config()).build(DIM)
    with pytest.raises(NoWeights, match="difference"):
        weights_of(mixer, (Chunk(torch.randn(1, 5, DIM)), mixer.initial_state(1)))
