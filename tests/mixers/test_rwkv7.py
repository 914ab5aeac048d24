"""RWKV-7's time mixing: its contract, the layer of flash-linear-attention, and the limit in which it erases nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.core.contract import Chunk, FirstValues
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.mixers.recurrent import RWKV7
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

DIM = 8
CONFIG = RWKV7.Config(num_heads=2, decay_rank=3, rate_rank=3, gate_rank=5)


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
def test_the_contract(check):
    reference = CONFIG.replace(impl="reference")
    CHECKS[check](MixerSubject(lambda: CONFIG.build(DIM), dim=DIM, impls={"reference": lambda: reference.build(DIM)}))


def absorbed(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype))[0]


def golden_of(file):
    with np.load(Path(__file__).parents[1] / "golden" / file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def ours(theirs):
    """The weights of flash-linear-attention's layer, by our names."""
    names = {"r": "r_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
    weights = {f"{ours}.weight": theirs[f"{name}.weight"] for ours, name in names.items()}
    for ours, name in {"decay": "w", "rate": "a", "gate": "g"}.items():
        weights[f"{ours}_down.weight"] = theirs[f"{name}_lora.lora.0.weight"]
        weights[f"{ours}_up.weight"] = theirs[f"{name}_lora.lora.2.weight"]
    weights |= {"decay_bias": theirs["w_lora.lora.2.bias"], "rate_bias": theirs["a_lora.lora.2.bias"]}
    weights |= {"erased": theirs["k_k"], "replaced": theirs["k_a"], "bonus": theirs["r_k"].flatten()}
    weights |= {"norm_weight": theirs["g_norm.weight"], "norm_bias": theirs["g_norm.bias"]}
    weights["shift"] = torch.stack([theirs[f"x_{name}"].flatten() for name in "rwkvag"])
    if "v_lora.lora.0.weight" in theirs:
        parts = {"down.weight": "0.weight", "up.weight": "2.weight", "bias": "2.bias"}
        weights |= {f"first_values.{name}": theirs[f"v_lora.lora.{part}"] for name, part in parts.items()}
    return weights


def test_parity_with_the_layer_of_flash_linear_attention():
    """fla 0.6.0, its first layer, with the naive forms of its kernels, in float64."""
    golden = golden_of("rwkv7.npz")
    theirs = {name.partition(".")[2]: each for name, each in golden.items() if name.startswith("weights")}
    mixer = CONFIG.build(DIM).double()
    mixer.load_state_dict(ours(theirs))
    torch.testing.assert_close(absorbed(mixer, golden["x"]), golden["y"], rtol=1e-10, atol=1e-10)


def test_where_nothing_is_erased_it_is_linear_attention_with_a_decay_by_channel():
    torch.manual_seed(0)
    mixer = CONFIG.build(DIM).double()
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
        mixer.shift.zero_()
        mixer.replaced.zero_()
        mixer.bonus.zero_()
        mixer.rate_bias.fill_(-60.0)
        r, k, v = (mixer._heads(part(x)) for part in (mixer.r, mixer.k, mixer.v))
        tilted = mixer.decay_up(mixer.decay_down(x).tanh()) + mixer.decay_bias
        decay = mixer._heads(-(-torch.tensor(0.5, dtype=torch.float64)).exp() * tilted.sigmoid())
        state = LinearState(r.new_zeros(2, 2, 4, 4), r.new_zeros(2, 2, 4))
        y, _ = linear_attention(r, k, v, state, log_decay=decay, eps=None)
        gate = mixer.gate_up(mixer.gate_down(x).sigmoid())
        want = mixer._output(y, torch.zeros_like(y), gate, None)
        torch.testing.assert_close(absorbed(mixer, x), want, rtol=1e-10, atol=1e-10)
        mixer.rate_bias.fill_(0.0)
        assert (absorbed(mixer, x) - want).abs().max() > 1e-2


def test_what_is_refused():
    with pytest.raises(KinformerError, match="rwkv7: impl='triton' takes at most 256 features and values a head"):
        RWKV7.Config(num_heads=1, head_dim=512, impl="triton").build(16)
    with pytest.raises(KinformerError, match="gate_rank must be 1 or more, but is 0"):
        RWKV7.Config(gate_rank=0)


RESIDUAL = CONFIG.replace(value_residual=True, value_rank=3)


@pytest.mark.parametrize("check", ["causality", "partition", "padding", "reset", "gradcheck"])
def test_the_contract_with_a_value_residual(check):
    CHECKS[check](MixerSubject(lambda: RESIDUAL.build(DIM), dim=DIM))


def test_parity_with_two_layers_of_flash_linear_attention():
    """fla 0.6.0, its own kernels in float32 (``make_rwkv7_layers.py``): the second has the first one's values."""
    golden, channel = golden_of("rwkv7_layers.npz"), FirstValues()
    for layer, x, y in (("first", "x", "y_first"), ("attn", "z", "y")):
        theirs = {name.partition("/")[2]: each for name, each in golden.items() if name.startswith(layer)}
        mixer = RESIDUAL.build(DIM)
        mixer.load_state_dict(ours(theirs), strict=layer == "attn")
        found = mixer(Chunk(golden[x], values=channel), mixer.initial_state(2))[0]
        torch.testing.assert_close(found, golden[y], rtol=1e-5, atol=1e-5)
    assert (absorbed(mixer, golden["z"]) - golden["y"]).abs().max() > 1e-2  # without the first layer's values


def test_values_are_mixed_with_those_of_the_first_layer():
    """v + (v_1 - v) sigmoid(...), as fla's layers after the first; the first layer's values stay its own."""
    torch.manual_seed(0)
    mixer, plain = RESIDUAL.build(DIM).double(), CONFIG.build(DIM).double()
    plain.load_state_dict(mixer.state_dict(), strict=False)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    assert torch.equal(absorbed(mixer, x), absorbed(plain, x))
    first, v = torch.randn(2, 2, 2, 6, DIM // 2, dtype=torch.float64)
    channel = FirstValues()
    channel.of(first)
    mixing = mixer.first_values
    gate = torch.sigmoid(x @ mixing.down.weight.T @ mixing.up.weight.T + mixing.bias)
    want = v + (first - v) * gate.view(2, 6, 2, DIM // 2).transpose(1, 2)
    torch.testing.assert_close(mixing(v, x, channel), want, rtol=1e-12, atol=1e-12)
    with pytest.raises(KinformerError, match="value_rank"):
        CONFIG.replace(value_rank=7)
