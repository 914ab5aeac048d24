"""Learned positions at every layer, against the authors' code of Transformer-XL without memory (``attn_type`` 3).

The golden arrays were computed in float64; its stack is post-norm, and its auxiliary losses are none.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import PostNorm
from kinformer.family.build import configure
from kinformer.heads.language import LanguageModelHead
from kinformer.inputs.tokens import Tokens
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.models.decoder import Decoder
from kinformer.parts.positions import LearnedPerLayer, NoPosition
from kinformer.parts.projections import MultiHead
from kinformer.runtime.errors import KinformerError

RENAMED = {
    "dec_attn.o_net": "mixer.out",
    "dec_attn.layer_norm": "mixer_residual.norm",
    "pos_ff.CoreNet.0": "feed_forward.up",
    "pos_ff.CoreNet.3": "feed_forward.down",
    "pos_ff.layer_norm": "feed_forward_residual.norm",
}


def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "alrfou_positions.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def close(got, want, limit=1e-12):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit


@pytest.fixture
def pair():
    """The authors' arrays, and our model with its weights in float64."""
    arrays = golden()
    layer = DecoderLayer.Config(
        mixer=SoftmaxAttention.Config(num_heads=2, projection=MultiHead.Config(bias=False), bias=False),
        feed_forward=MLP.Config(hidden_dim=24, activation="relu"),
        residual=PostNorm.Config(),
    )
    model = Decoder.Config(
        input=Tokens.Config(vocab_size=17, scale=True),
        dim=16,
        layers=(layer,) * 3,
        position=LearnedPerLayer.Config(max_length=6),
        head=LanguageModelHead.Config(bias=True),
        norm=None,
    ).build()
    weights = {
        "input.embedding.weight": arrays["w.word_emb.emb_layers.0.weight"],
        "head.bias": arrays["w.crit.out_layers.0.bias"],
    }
    for index in range(3):
        place = f"w.layers.{index}"
        weights[f"position.tables.{index}"] = arrays["w.r_emb"][index].flatten(1)
        parts = [arrays[f"{place}.dec_attn.{name}_net.weight"] for name in ("q", "kv")]
        weights[f"stack.layers.{index}.mixer.projection.qkv.weight"] = torch.cat(parts)
        for theirs, ours in RENAMED.items():
            for kind in ("weight", "bias"):
                if (name := f"{place}.{theirs}.{kind}") in arrays:
                    weights[f"stack.layers.{index}.{ours}.{kind}"] = arrays[name]
    model.double().load_state_dict(weights)
    return arrays, model


def test_layers_and_logits_are_the_authors(pair):
    arrays, model = pair
    tokens = arrays["in.data"].mT
    with torch.no_grad():
        hidden, _, tapped = model.hidden(tokens, taps=(0, 1, 2))
        logits = model.logits(hidden)
    for index, output in enumerate(tapped):
        close(output, arrays[f"out.layer{index}.output"].transpose(0, 1))
    close(logits, arrays["out.logits"].transpose(0, 1))


def test_gradients_of_the_tables_are_the_authors(pair):
    arrays, model = pair
    logits, _ = model(arrays["in.data"].mT)
    cross_entropy(logits.flatten(0, 1), arrays["in.target"].mT.flatten(), reduction="sum").backward()
    got = torch.stack([table.grad for table in model.position.tables])
    close(got, arrays["grad.r_emb"].flatten(2), 1e-11)


def test_tables_of_zeros_are_no_positions():
    torch.manual_seed(0)
    config = configure("deep-char", "tiny", 23)
    model, plain = config.build(), config.replace(position=NoPosition.Config()).build()
    weights = model.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    tokens = torch.randint(23, (2, 9))
    assert (model(tokens)[0] - plain(tokens)[0]).abs().max() > 1e-3
    with torch.no_grad():
        for table in model.position.tables:
            table.zero_()
    assert torch.equal(model(tokens)[0], plain(tokens)[0])


def test_every_layer_has_its_own():
    model = configure("deep-char", "tiny", 23).build()
    tokens = torch.randint(23, (2, 9))
    before = model.hidden(tokens, taps=(0, 1))[2]
    with torch.no_grad():
        model.position.tables[1] += 1
    after = model.hidden(tokens, taps=(0, 1))[2]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_a_position_beyond_the_tables_is_refused():
    model = configure("deep-char", "tiny", 23, {"position.max_length": 5}).build()
    assert model.max_length == 5
    _, state = model(torch.zeros(1, 5, dtype=torch.int64))
    told = "position 5 does not have an embedding: learned positions end at max_length = 5"
    with pytest.raises(KinformerError, match=told):
        model(torch.zeros(1, 1, dtype=torch.int64), state)
    with pytest.raises(KinformerError, match="is added to token embeddings, but was given to a mixer"):
        SoftmaxAttention.Config(num_heads=2, position=LearnedPerLayer.Config()).build(16)
