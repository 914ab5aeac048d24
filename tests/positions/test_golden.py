"""Relative positions against implementations that others wrote, with the same weights.

The golden arrays were computed in float64 by tensor2tensor 1.15 (Shaw), the authors' code of Transformer-XL and of
ALiBi, and transformers 4.57 (T5, whose attention works in float32).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kinformer.core.contract import Chunk
from kinformer.core.pattern import Band
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import T5, Alibi, Shaw, TransformerXL, buckets
from kinformer.parts.scores import Dot

GOLDEN = Path(__file__).parents[1] / "golden"
IMPLS = ("reference", "chunked")


def golden(name):
    with np.load(GOLDEN / name, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def close(got, want, limit=1e-12):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit


def attend(q, k, v, position, scale, ahead, impl):
    """q, k, v [batch, heads, time, head_dim] of whole sequences under ``position``."""
    time = q.shape[2]
    positions = torch.arange(time).expand(q.shape[0], -1)
    q, k = position.rotate(q, k, positions)
    relative = position.relative(1 - time if ahead is None else 0, time - 1)
    visibility, scoring = Visibility(Band(ahead=ahead), positions), Scoring(scale, relative=relative)
    return attention(q, k, position.values(v), visibility, scoring, impl=impl).out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("name", "ahead"), [("causal", 0), ("nomask", None)])
def test_shaw_is_that_of_tensor2tensor(name, ahead, impl):
    arrays = golden("shaw_relative.npz")
    shaw = Shaw.Config(max_distance=3).build_heads(12, 2, 6).double()
    with torch.no_grad():
        shaw.key_table.copy_(arrays["in.fn.table_k"])
        shaw.value_table.copy_(arrays["in.fn.table_v"])
        out = attend(*(arrays[f"in.fn.{each}"] for each in "qkv"), shaw, 1.0, ahead, impl)
    close(out, arrays[f"out.fn.{name}.output"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [4, 12])
def test_alibi_is_that_of_its_authors(heads, impl):
    arrays = {key.removeprefix(f"out.h{heads}."): array for key, array in golden("alibi.npz").items()}
    alibi = Alibi.Config().build_heads(heads * 4, heads, 4)
    close(alibi.slopes(), arrays["slopes"])
    last = alibi.relative(0, 7).bias.flip(1)[:, None]
    close(last, arrays["mpt_bias"].double(), 1e-6)
    q, k, v = (arrays[f"in.h{heads}.{each}"] for each in "qkv")
    close(attend(q, k, v, alibi, 0.5, 0, impl), arrays["attention_output"])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_those_of_t5(bidirectional):
    arrays = golden("t5_bias.npz")
    config = T5.Config(bidirectional=bidirectional)
    got = buckets(config, -arrays["in.relative_position"])
    assert torch.equal(got, arrays[f"out.buckets_{'bidirectional' if bidirectional else 'causal'}"])
    unused = [16] if bidirectional else []  # the bucket of distance 0 ahead
    assert got.unique().tolist() == [bucket for bucket in range(32) if bucket not in unused]


def test_t5_attention_is_that_of_transformers():
    arrays = {key.removeprefix("w.causal."): array for key, array in golden("t5_bias.npz").items()}
    mixer = SoftmaxAttention.Config(
        num_heads=2, projection=MultiHead.Config(bias=False), position=T5.Config(), score=Dot.Config(), bias=False
    )
    mixer = mixer.build(16).double()
    with torch.no_grad():
        mixer.projection.qkv.weight.copy_(torch.cat([arrays[f"{part}.weight"] for part in "qkv"]))
        mixer.out.weight.copy_(arrays["o.weight"])
        mixer.position.table.copy_(arrays["relative_attention_bias.weight"])
        y, _ = mixer(Chunk(arrays["in.x"]), mixer.initial_state(2))
    close(y, arrays["out.causal.output"], 5e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_t5_attends_both_ways_as_transformers(impl):
    arrays = {key.removeprefix("w.bidirectional."): array for key, array in golden("t5_bias.npz").items()}
    position = T5.Config(bidirectional=True).build_heads(16, 2, 8).double()
    with torch.no_grad():
        position.table.copy_(arrays["relative_attention_bias.weight"])
        x = arrays["in.x"]
        q, k, v = ((x @ arrays[f"{part}.weight"].T).view(2, 12, 2, 8).transpose(1, 2) for part in "qkv")
        y = attend(q, k, v, position, 1.0, None, impl).transpose(1, 2).flatten(2) @ arrays["o.weight"].T
    close(y, arrays["out.bidirectional.output"], 5e-6)


@pytest.mark.parametrize("layer", [0, 1])
def test_xl_is_that_of_its_authors(layer):
    """A segment, and the next one that sees the first as its memory: attention, residual sum and norm of a layer."""
    arrays = golden("transformer_xl.npz")
    weights = {key.removeprefix(f"w.layers.{layer}.dec_attn."): array for key, array in arrays.items()}
    mixer = SoftmaxAttention.Config(
        num_heads=2, projection=MultiHead.Config(bias=False), position=TransformerXL.Config(), bias=False
    )
    mixer, norm = mixer.build(16).double(), nn.LayerNorm(16).double()
    with torch.no_grad():
        mixer.projection.qkv.weight.copy_(weights["qkv_net.weight"])
        mixer.out.weight.copy_(weights["o_net.weight"])
        mixer.position.projection.weight.copy_(weights["r_net.weight"])
        mixer.position.biases.content.copy_(arrays["w.r_w_bias"])
        mixer.position.biases.position.copy_(arrays["w.r_r_bias"])
        norm.load_state_dict({kind: weights[f"layer_norm.{kind}"] for kind in ("weight", "bias")})
        state = mixer.initial_state(2)
        for segment in ("seg0", "seg1"):
            x = arrays["w.word_emb.emb_layers.0.weight"][arrays[f"in.{segment}.data"]] * 4.0
            x = (x if layer == 0 else arrays[f"out.{segment}.layer0.output"]).transpose(0, 1)
            y, state = mixer(Chunk(x), state)
            close(norm(x + y).transpose(0, 1), arrays[f"out.{segment}.layer{layer}.attn_sublayer"])
