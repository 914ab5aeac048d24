"""Every layer in every model: bare and SHA-RNN's in decoders, encoders and encoder-decoders, by a change of kind."""

import pytest
import torch

import kinformer
from kinformer.blocks.layer import BareDecoderLayer, ShaRnnEncoderLayer
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.family.build import configure
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.recurrent import BidirectionalLSTM
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import (
    ENCODER_MODEL_CHECKS,
    MODEL_CHECKS,
    EncoderModelSubject,
    ModelSubject,
    SourceModelSubject,
)

DECODERS = {
    "bare": ("gpt", {"layers.*.kind": "bare", "layers": 1}),
    "bare over a source": ("vanilla", {"layers.*.kind": "bare", "layers": 1, "encoder.layers": 1}),
    "sha_rnn over a source": (
        "vanilla",
        {"layers.*.kind": "sha_rnn", "layers.*.mixer": "lstm", "layers": 1, "encoder.layers": 1},
    ),
}
ENCODERS = {
    "lstm": {"layers.*.kind": "sha_rnn", "layers.*.mixer": "lstm", "layers": 1},
    "with attention": {
        "layers.*": {"kind": "sha_rnn", "mixer": "lstm", "attention": {"kind": "bidirectional", "num_heads": 2}},
        "layers": 1,
    },
}


@pytest.mark.parametrize("check", ["causality", "partition", "padding", "reset"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_keep_the_contract(name, check):
    member, changes = DECODERS[name]
    config = configure(member, "tiny", 23, set=changes)
    subject = SourceModelSubject if member == "vanilla" else ModelSubject
    MODEL_CHECKS[check](subject(config.build, vocab_size=23))


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_keep_theirs(name, check):
    config = configure("bert", "tiny", 23, set=ENCODERS[name])
    ENCODER_MODEL_CHECKS[check](EncoderModelSubject(config.build, vocab_size=23, global_tokens=False))


def test_the_encoders_layer_is_its_formula_and_a_bare_one_its_mixer():
    torch.manual_seed(0)
    attention = BidirectionalAttention.Config(num_heads=2)
    layer = ShaRnnEncoderLayer.Config(mixer=BidirectionalLSTM.Config(), attention=attention).build(16).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    h = layer.mixer(layer.mixer_norm(x), SequenceContext())
    h = h + layer.attention(layer.attention_norm(h), SequenceContext())
    want = layer.stream_norm(h) + layer.feed_forward(layer.feed_forward_norm(h))
    torch.testing.assert_close(layer(x, SequenceContext()), want, rtol=0, atol=0)
    bare = BareDecoderLayer.Config(mixer=SoftmaxAttention.Config(num_heads=2)).build(16).double()
    state = bare.initial_state(2, dtype=x.dtype)
    assert torch.equal(bare(Chunk(x), state)[0], bare.mixer(Chunk(x), state[0])[0])


def test_product_keys_and_wirings_go_everywhere_and_star_says_where_it_cannot():
    for member in ("gpt", "bert", "vanilla"):
        kinformer.build(member, recipe="tiny", set={"layers.*.kind": "macaron", "layers.*.residual": "gated"})
        kinformer.build(member, recipe="tiny", set={"layers.*.feed_forward": "product_keys"})
    kinformer.build("vanilla", recipe="tiny", set={"encoder.layers.*.kind": "bare", "encoder.layers.*.mixer": "star"})
    with pytest.raises(KinformerError, match="'star' is not a known mixer"):
        kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer": "star"})
