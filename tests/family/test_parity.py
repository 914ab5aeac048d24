"""Members and mixers against implementations that others wrote, with the same weights.

The golden arrays were computed by pytorch-fast-transformers 0.4.0 (of the Linear Transformer's authors), lmtool-fwp
(of the fast weights' authors) and labml-nn 0.5.1, all in float32; GPT-2 is that of the library transformers.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import PostNorm
from kinformer.core.contract import Chunk
from kinformer.family.build import model_config
from kinformer.interop.gpt2 import ARCHITECTURES
from kinformer.mixers.linear import LinearAttention
from kinformer.parts.feature_maps import Dpfp, Elu, Quadratic, SumNormalised

SIZES = {"vocab_size": 47, "n_positions": 40, "n_embd": 24, "n_layer": 3, "n_head": 3}
GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name):
    with np.load(GOLDEN / name, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def close(got, want, limit):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit * max(1.0, float(want.abs().max()))


@pytest.fixture(scope="module")
def gpt_pair():
    """transformers' GPT-2 and our member gpt with its weights, both in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).double().eval()
    data = ARCHITECTURES["gpt2"].read_config(SIZES, Path("peer"))
    ours = model_config(data).build().double().eval()
    weights = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    ours.load_state_dict(ARCHITECTURES["gpt2"].read_tensors(weights, data, Path("peer")))
    return theirs, ours, torch.randint(47, (3, 33), generator=torch.Generator().manual_seed(1))


def test_gpt_has_the_logits_of_gpt2(gpt_pair):
    theirs, ours, tokens = gpt_pair
    with torch.no_grad():
        close(ours(tokens)[0], theirs(tokens).logits, 1e-11)


def test_gpt_has_the_gradients_of_gpt2(gpt_pair):
    theirs, ours, tokens = gpt_pair
    for model in gpt_pair[:2]:
        model.zero_grad()
    want, got = theirs(tokens).logits, ours(tokens)[0]
    for logits in (want, got):
        cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    data = ARCHITECTURES["gpt2"].read_config(SIZES, Path("peer"))
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in ARCHITECTURES["gpt2"].read_tensors(gradients, data, Path("peer")).items():
        close(ours.get_parameter(name).grad, gradient, 1e-11)


def test_gpt_steps_as_gpt2_with_its_cache(gpt_pair):
    theirs, ours, tokens = gpt_pair
    state = cache = None
    with torch.no_grad():
        for chunk in tokens.split([10, 1, 1, 7, 1, 13], dim=1):
            want, cache = theirs(chunk, cache, use_cache=True).to_tuple()
            logits, state = ours(chunk, state)
            close(logits, want, 1e-11)


def test_gpt_with_padding_on_the_left_as_gpt2_with_its_mask(gpt_pair):
    theirs, ours, tokens = gpt_pair
    valid = torch.arange(33) >= torch.tensor([[0], [5], [20]])
    with torch.no_grad():
        want = theirs(tokens, attention_mask=valid.long(), position_ids=(valid.cumsum(1) - 1).clamp(min=0)).logits
        got, _ = ours(tokens, valid=valid)
    close(got[valid], want[valid], 1e-11)


def test_linear_attention_is_that_of_fast_transformers():
    """Causal, the end of the second row being padding: all positions that are valid are compared."""
    arrays = golden("linear_layer.npz")
    mixer = LinearAttention.Config(num_heads=2).build(16)
    parts = ("query", "key", "value")
    with torch.no_grad():
        for kind in ("weight", "bias"):
            joined = torch.cat([arrays[f"layer.{part}_projection.{kind}"] for part in parts])
            getattr(mixer.qkv, kind).copy_(joined)
            getattr(mixer.out, kind).copy_(arrays[f"layer.out_projection.{kind}"])
        valid = torch.arange(24) < arrays["key_lengths"][:, None]
        y, _ = mixer(Chunk(arrays["x"], valid), mixer.initial_state(2))
    assert valid.sum() == 24 + 17
    close(y[valid], arrays["layer_out"][valid], 2e-6)
    close(Elu.Config().build(8)(arrays["q"]), arrays["phi_q"], 1e-6)


DELTA = LinearAttention.Config(
    num_heads=2, feature_map=SumNormalised.Config(eps=0.0), rule="delta", normaliser="none", scale=True, bias=False
)
LAYERS = {
    "delta_dpfp": DELTA,
    "delta_elu": DELTA.replace(feature_map=SumNormalised.Config(inner=Elu.Config(), eps=0.0)),
    "deltanorm_elu": DELTA.replace(
        feature_map=SumNormalised.Config(inner=Elu.Config(), eps=0.0), normaliser="attention", eps=1e-5
    ),
    "sum_elu": LinearAttention.Config(num_heads=2, eps=1e-5, scale=True, bias=False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_fast_weight_layer_is_that_of_its_authors(name):
    """Mixer, residual sum and the norm after it; the feed-forward is left out by asking the layer's own parts."""
    arrays = golden("fast_weight_layers.npz")
    layer = DecoderLayer.Config(mixer=LAYERS[name], residual=PostNorm.Config()).build(16)
    weights = {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}
    with torch.no_grad():
        rows = weights["qkvb_net.weight" if "qkvb_net.weight" in weights else "qkv_net.weight"]
        if layer.mixer.config.rule == "linear":  # theirs stand head by head
            rows = rows.view(2, 3, 8, 16).transpose(0, 1).flatten(0, 2)
        layer.mixer.qkv.weight.copy_(rows)
        layer.mixer.out.weight.copy_(weights["o_net.weight"])
        layer.mixer_residual.norm.load_state_dict({kind: weights[f"layer_norm.{kind}"] for kind in ("weight", "bias")})
        x = arrays["h"].transpose(0, 1)
        y, state = layer.mixer(Chunk(x), layer.mixer.initial_state(2))
        got = layer.mixer_residual.norm(x + y)
    close(got, weights["out"].transpose(0, 1), 5e-6)
    close(state[0], weights["W_last"], 1e-5)


def test_fast_weights_are_those_of_labml():
    """labml adds 1e-6 to the features' sum, has a bias after the output product, and no factor 1 / sqrt(head_dim)."""
    arrays = {key.removeprefix("labml."): array for key, array in golden("fast_weight_layers.npz").items()}
    mixer = DELTA.replace(feature_map=SumNormalised.Config(eps=1e-6)).build(16)
    parts = [arrays[f"{part}.linear.weight"].view(2, 8, 16) for part in ("query", "key", "value")]
    beta = arrays["interpolation_weight.0.linear.weight"].view(2, 1, 16)
    with torch.no_grad():
        mixer.qkv.weight.copy_(torch.cat([*parts, beta], dim=1).flatten(0, 1))
        mixer.out.weight.copy_(arrays["output.weight"])
        y, _ = mixer(Chunk(arrays["x"].transpose(0, 1)), mixer.initial_state(2))
    close(y * 8**0.5 + arrays["output.bias"], arrays["out"].transpose(0, 1), 5e-6)


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_is_that_of_labml(nu):
    arrays = golden("fast_weight_layers.npz")
    features = Dpfp.Config(nu=nu).build(8)
    close(features(arrays["feat_in"]), arrays[f"dpfp{nu}"], 1e-6)
    assert features.size(8) == arrays[f"dpfp{nu}"].shape[-1]


@pytest.mark.parametrize("c", [0.0, 1.0, 0.3])
def test_quadratic_features_give_the_squared_kernel(c):
    q, k = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = Quadratic.Config(c=c).build(7)
    close(features(q) @ features(k).T, (q @ k.T + c) ** 2, 1e-13)
    assert features(q).shape[-1] == features.size(7)
    assert (features(q)[:, -1] == c).all()
