"""The Macaron layer: that of its authors, with the same weights, and the standard layer in its limit.

The golden arrays were computed by macaron-net 3a84e7a332, whose attention takes the softmax in float32. Its encoder
layer reads both sides; its decoder layer has attention to a source, which a stand-in for the mixer does here.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import DecoderLayer, MacaronEncoderLayer, MacaronLayer
from kinformer.blocks.residual import PostNorm, PreNorm
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.core.parts import merge_heads
from kinformer.family.build import configure
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.testing import ENCODER_MODEL_CHECKS, EncoderModelSubject

GOLDEN = Path(__file__).parents[1] / "golden" / "macaron.npz"
DIM, HEADS, LIMIT = 12, 2, 1e-6


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def part(golden, prefix):
    return {name.removeprefix(prefix): value for name, value in golden.items() if name.startswith(prefix)}


def attend(weights, queries, keys, seen=None):
    """Multi-head attention of ``queries`` to the ``seen`` of ``keys`` [batch, time, dim], one matrix for q, k and v."""
    joined, bias = weights["in_proj_weight"].split(DIM), weights["in_proj_bias"].split(DIM)
    q, k, v = (
        (x @ matrix.T + offset).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, matrix, offset in zip((queries, keys, keys), joined, bias, strict=True)
    )
    y = merge_heads(scaled_dot_product_attention(q, k, v, None if seen is None else seen[:, None, None]))
    return y @ weights["out_proj.weight"].T + weights["out_proj.bias"]


class StandIn(CausalMixer):
    """``function(x)`` as a mixer without a state."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def initial_state(self, batch, *, device=None, dtype=None):
        return ()

    def forward(self, chunk, state):
        return self.function(chunk.x), state


def load_feed_forward(layer, name, first, second):
    """``first`` and ``second`` are (weight, bias); units that the layer has more are switched off."""
    module = getattr(layer, name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        units = len(first[1])
        module.up.weight[:units], module.up.bias[:units] = first
        module.down.weight[:, :units], module.down.bias[:] = second


def built(config, hidden, weights, norms, residual):
    """A layer with the feed-forwards and norms of the authors' layer."""
    config = config.replace(
        feed_forward=MLP.Config(hidden_dim=hidden, activation="relu"),
        residual=residual,
    )
    layer = config.build(DIM).double()
    for name, prefix in (("first_feed_forward", "macaron_"), ("feed_forward", "")):
        pairs = ((weights[f"{prefix}{each}.weight"], weights[f"{prefix}{each}.bias"]) for each in ("fc1", "fc2"))
        load_feed_forward(layer, name, *pairs)
    for name, theirs in zip(
        ("first_residual.norm", "mixer_residual.norm", "feed_forward_residual.norm"), norms, strict=True
    ):
        layer.get_submodule(name).load_state_dict({kind: weights[f"{theirs}.{kind}"] for kind in ("weight", "bias")})
    return layer


def load_attention(mixer, weights):
    mixer.projection.qkv.load_state_dict({kind: weights[f"in_proj_{kind}"] for kind in ("weight", "bias")})
    mixer.out.load_state_dict({kind: weights[f"out_proj.{kind}"] for kind in ("weight", "bias")})


def test_post_norm_is_the_authors_encoder_layer(golden):
    weights = part(golden, "enc.")
    config = MacaronEncoderLayer.Config(mixer=BidirectionalAttention.Config(num_heads=HEADS))
    norms = "layer_norms.2", "layer_norms.0", "layer_norms.1"
    layer = built(config, 16, weights, norms, PostNorm.Config())
    load_attention(layer.mixer, part(weights, "self_attn."))
    x, valid = golden["src"].transpose(0, 1), ~golden["src_padding"]
    for name, text in {"enc_out_nopad": SequenceContext(), "enc_out": SequenceContext(valid)}.items():
        gap = (layer(x, text) - golden[name].transpose(0, 1))[valid if name == "enc_out" else slice(None)]
        assert gap.abs().max() < LIMIT


def test_pre_norm_is_the_authors_decoder_layer(golden):
    """Self-attention is our mixer; attention to the source follows it inside the stand-in."""
    weights = part(golden, "dec.")
    config = MacaronLayer.Config(mixer=SoftmaxAttention.Config(num_heads=HEADS))
    norms = "macaron_layer_norm", "self_attn_layer_norm", "final_layer_norm"
    layer = built(config, 19, weights, norms, PreNorm.Config())
    own = layer.mixer
    load_attention(own, part(weights, "self_attn."))
    norm = nn.LayerNorm(DIM).double()
    norm.load_state_dict({kind: weights[f"encoder_attn_layer_norm.{kind}"] for kind in ("weight", "bias")})
    source, entered = golden["enc_out"].transpose(0, 1), []

    def both(x):
        y, _ = own(Chunk(x), own.initial_state(x.shape[0]))
        return y + attend(part(weights, "encoder_attn."), norm(entered[-1] + y), source, ~golden["src_padding"])

    layer.mixer_residual.norm.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    layer.mixer = StandIn(both)
    y, _ = layer(Chunk(golden["tgt"].transpose(0, 1)), ((),))
    assert len(entered) == 1
    assert (y - golden["dec_out"].transpose(0, 1)).abs().max() < LIMIT


@pytest.mark.parametrize("residual", [PreNorm.Config(), PostNorm.Config()])
def test_without_its_first_half_and_with_its_second_doubled_it_is_the_standard_layer(residual):
    """In post-norm the first norm still acts, so the input is normed as it would be between layers."""
    torch.manual_seed(0)
    options = {"mixer": SoftmaxAttention.Config(num_heads=2), "residual": residual}
    standard, layer = (
        DecoderLayer.Config(**options).build(16).double(),
        MacaronLayer.Config(**options).build(16).double(),
    )
    layer.load_state_dict(standard.state_dict(), strict=False)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    x = x if residual.kind == "pre" else nn.functional.layer_norm(x, (16,), eps=0.0)
    layer.first_residual.norm.eps = 0.0
    state = standard.initial_state(2)
    with torch.no_grad():
        want, _ = standard(Chunk(x), state)
        assert (layer(Chunk(x), state)[0] - want).abs().max() > 1e-2
        for parameter in layer.first_feed_forward.parameters():
            parameter.zero_()
        for parameter in layer.feed_forward.down.parameters():
            parameter.mul_(2)
        got, after = layer(Chunk(x), state)
    assert (got - want).abs().max() < 1e-12
    assert len(after) == 1 and after[0].k.shape[2] == 9


def test_the_half_step_comes_after_dropout():
    layer = MacaronLayer.Config(mixer=SoftmaxAttention.Config(num_heads=2), dropout=0.5).build(16)
    x, y = torch.zeros(1, 4, 16), torch.ones(1, 4, 16)
    assert set(layer.first_residual.leave(x, y, 0.5).unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
def test_an_encoder_of_them_keeps_the_laws(check):
    ENCODER_MODEL_CHECKS[check](EncoderModelSubject(configure("macaron", "tiny-encoder", 61).build, 61, time=17))


def test_an_encoder_layer_answers_where_it_is_asked_and_reverses():
    mixer = BidirectionalAttention.Config(num_heads=2)
    layer = MacaronEncoderLayer.Config(mixer=mixer, residual=PreNorm.Config()).build(16).double()
    x, mask = torch.randn(2, 9, 16, dtype=torch.float64), torch.rand(2, 9) < 0.5
    y = layer(x, SequenceContext())
    assert torch.equal(layer(x, SequenceContext(), mask), torch.where(mask[..., None], y, x))
    z = x
    for branch in layer.branches():
        z = z + branch.run(z, SequenceContext(), ())[0]
    assert (z - y).abs().max() < 1e-12
