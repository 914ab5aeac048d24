"""Rotary decoders against those of the library transformers, with the same weights, in float64.

GPT-NeoX turns the first quarter of each head's features in two halves, pre-norm; RoFormer turns all of them in pairs of
neighbours, post-norm.
"""

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.family.build import build

transformers = pytest.importorskip("transformers")

DIM, HEADS, DEPTH, VOCAB = 32, 2, 2, 37
YARN = {"factor": 4.0, "original_length": 16}
LAYER = {
    "attention.dense": "mixer.out",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
    "input_layernorm": "mixer_residual.norm",
    "post_attention_layernorm": "feed_forward_residual.norm",
}


def by_kind(fused):
    """A fused product whose rows are [heads, 3, head_dim] as ours, [3, heads, head_dim]."""
    return fused.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)


def neox(scaling):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if scaling:
        parameters |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    sizes = {"vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    config = transformers.GPTNeoXConfig(
        **sizes,
        intermediate_size=4 * DIM,
        use_parallel_residual=False,
        rope_parameters=parameters,
        max_position_embeddings=16,
        initializer_range=0.2,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPTNeoXForCausalLM(config).double().eval()


def converted(theirs):
    """GPT-NeoX's weights under our names."""
    weights = {
        "input.embedding.weight": theirs.gpt_neox.embed_in.weight,
        "head.output.weight": theirs.get_output_embeddings().weight,
        "norm.weight": theirs.gpt_neox.final_layer_norm.weight,
        "norm.bias": theirs.gpt_neox.final_layer_norm.bias,
    }
    for index, layer in enumerate(theirs.gpt_neox.layers):
        for kind in ("weight", "bias"):
            fused = getattr(layer.attention.query_key_value, kind)
            weights[f"stack.layers.{index}.mixer.projection.qkv.{kind}"] = by_kind(fused)
            for name, own in LAYER.items():
                weights[f"stack.layers.{index}.{own}.{kind}"] = layer.get_submodule(name).get_parameter(kind)
    return weights


@pytest.mark.parametrize("scaling", [{}, {"scaling": "yarn", **YARN}], ids=["plain", "yarn"])
def test_gpt_neox(scaling):
    torch.manual_seed(0)
    theirs = neox(scaling)
    position = {"kind": "rope", "fraction": 0.25, **scaling}
    changes = {"layers.*.mixer.position": position, "head.tied": False, "layers.*.feed_forward.activation": "gelu"}
    ours = build("rope", "tiny", VOCAB, changes).double().eval()
    ours.load_state_dict(converted(theirs))
    tokens = torch.randint(VOCAB, (2, 40))
    with torch.no_grad():
        want = theirs(tokens).logits
        got, _ = ours(tokens)
        assert (got - want).abs().max() < 1e-5 * want.abs().max()  # their angles are float32
        left, state = ours(tokens[:, :23])
        right, _ = ours(tokens[:, 23:], state)
    assert (torch.cat([left, right], dim=1) - got).abs().max() < 1e-10


def test_a_roformer_layer():
    """Its sinusoids are a float32 table, so the values agree to single precision."""
    config = transformers.RoFormerConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * DIM,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_decoder=True,
        use_cache=False,
        layer_norm_eps=1e-5,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    theirs = transformers.RoFormerModel(config).double().eval().encoder
    ours = build("rope", "tiny", VOCAB, {"layers.*.residual": "post"}).double().eval()
    for mine, other in zip(ours.stack.layers, theirs.layer, strict=True):
        self, out = other.attention.self, other.attention.output
        for kind in ("weight", "bias"):
            parts = {
                "mixer.projection.qkv": torch.cat([getattr(each, kind) for each in (self.query, self.key, self.value)]),
                "mixer.out": getattr(out.dense, kind),
                "mixer_residual.norm": getattr(out.LayerNorm, kind),
                "feed_forward.up": getattr(other.intermediate.dense, kind),
                "feed_forward.down": getattr(other.output.dense, kind),
                "feed_forward_residual.norm": getattr(other.output.LayerNorm, kind),
            }
            with torch.no_grad():
                for name, weight in parts.items():
                    mine.get_submodule(name).get_parameter(kind).copy_(weight)
    x = torch.randn(2, 11, DIM, dtype=torch.float64)
    mask = torch.full((11, 11), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        want = theirs(x, attention_mask=mask).last_hidden_state
        got = x
        for layer in ours.stack.layers:
            got, _ = layer(Chunk(got), layer.initial_state(2, dtype=torch.float64))
    assert (got - want).abs().max() < 2e-6
