"""Primer's convolution over time, against an implementation that others wrote and against PyTorch's own convolution.

The golden arrays were computed by labml-nn 0.5.1 (``MultiDPHConvHeadAttention``, ``SquaredReLU``) in float64, with
biases of zero; the last tap of a PyTorch convolution is the current token.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kinformer.blocks.feed_forward import MLP
from kinformer.core.contract import Chunk
from kinformer.core.state import nbytes
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import Convolved, Grouped, MultiHead
from kinformer.runtime.errors import KinformerError

PARTS = ("query", "key", "value")
CONFIG = SoftmaxAttention.Config(
    num_heads=2, projection=Convolved.Config(inner=MultiHead.Config(bias=False)), bias=False
)


def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "primer.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def close(got, want, limit=1e-12):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit


@pytest.fixture
def layer():
    """labml's arrays, and our mixer with its weights in float64."""
    arrays = golden()
    mixer = CONFIG.build(16).double()
    with torch.no_grad():
        mixer.projection.inner.qkv.weight.copy_(torch.cat([arrays[f"attn.{part}.0.linear.weight"] for part in PARTS]))
        taps = [arrays[f"attn.{part}.1.conv.weight"].view(2, 8, 3) for part in PARTS]
        mixer.projection.weight.copy_(torch.cat(taps).permute(2, 0, 1).flip(0))
        mixer.out.weight.copy_(arrays["attn.output.weight"])
    return arrays, mixer


def run(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype))


def test_first_weights_are_the_authors(layer):
    arrays, _ = layer
    first = Convolved.Config().build(16, 2, 8).weight
    assert first.shape == (3, 6, 8)
    for tap in range(3):
        assert torch.equal(first[tap], arrays["attn.query.1.conv.weight"][0, 0, 2 - tap].float().expand(6, 8))


def test_heads_are_those_of_labml(layer):
    arrays, mixer = layer
    q, k, v = mixer.projection(arrays["x"].transpose(0, 1))
    tokens = nn.functional.pad(torch.cat([q, k, v], dim=1), (0, 0, 2, 0))
    for got, part in zip(mixer.projection.combine(tokens, None, tokens), "qkv", strict=True):
        close(got, arrays[f"{part}_conv"].permute(1, 2, 0, 3))


def test_attention_and_its_gradients_are_those_of_labml(layer):
    arrays, mixer = layer
    x = arrays["x"].transpose(0, 1).clone().requires_grad_()
    y, _ = run(mixer, x)
    close(y, arrays["out_scaled"].transpose(0, 1))
    y.backward(arrays["grad_out"].transpose(0, 1))
    close(x.grad, arrays["grad_x"].transpose(0, 1), 1e-11)
    taps = arrays["grad_conv_q"].view(2, 8, 3).permute(2, 0, 1).flip(0)
    close(mixer.projection.weight.grad[:, :2], taps, 1e-11)


def test_feed_forward_with_squared_relu_is_that_of_labml():
    arrays = golden()
    block = MLP.Config(hidden_dim=32, activation="squared_relu").build(16).double()
    renamed = {"layer1": "up", "layer2": "down"}
    weights = {
        f"{renamed[name]}.{kind}": arrays[f"ff.{name}.{kind}"] for name in renamed for kind in ("weight", "bias")
    }
    block.load_state_dict(weights)
    close(block(arrays["x"]), arrays["ff_out"])


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("inner", [MultiHead.Config(), Grouped.Config(num_kv_heads=1)])
def test_is_a_depthwise_convolution(width, inner):
    torch.manual_seed(0)
    projection = Convolved.Config(width=width, inner=inner).build(16, 2, 8).double()
    nn.init.normal_(projection.weight)
    tokens = torch.randn(3, sum(projection.heads), width - 1 + 7, 8, dtype=torch.float64)
    channels = tokens.transpose(2, 3).flatten(1, 2)
    kernel = projection.weight.flip(0).flatten(1).mT[:, None]
    want = nn.functional.conv1d(channels, kernel, groups=len(kernel)).view(3, -1, 8, 7).transpose(2, 3)
    close(torch.cat(projection.combine(tokens, None, tokens), dim=1), want)


def test_a_kernel_of_the_token_itself_is_exact_attention():
    torch.manual_seed(0)
    mixer = CONFIG.build(16).double()
    plain = CONFIG.replace(projection=MultiHead.Config(bias=False)).build(16).double()
    plain.load_state_dict({"projection.qkv.weight": mixer.projection.inner.qkv.weight, "out.weight": mixer.out.weight})
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    assert (run(mixer, x)[0] - run(plain, x)[0]).abs().max() > 1e-3
    with torch.no_grad():
        mixer.projection.weight[0], mixer.projection.weight[1:] = 1.0, 0.0
    close(run(mixer, x)[0], run(plain, x)[0], 1e-14)


def test_remembers_as_many_tokens_as_it_looks_back_at():
    mixer = CONFIG.build(16)
    sizes = [run(mixer, torch.randn(2, length, 16))[1].recent.shape[2] for length in (1, 2, 3, 9)]
    assert sizes == [1, 2, 2, 2]
    state = run(mixer, torch.randn(2, 9, 16))[1]
    assert nbytes(state) == 2 * mixer.state_bytes(9)
    plain = CONFIG.replace(projection=MultiHead.Config()).build(16)
    assert mixer.state_bytes(9) - plain.state_bytes(9) == 2 * 6 * 8 * 4


def test_refuses_what_is_no_convolution():
    with pytest.raises(KinformerError, match="width must be 2 or more, but is 1"):
        Convolved.Config(width=1)
    with pytest.raises(KinformerError, match=r"cannot stand around 'convolved'.*\(multi_head, grouped\)"):
        Convolved.Config(inner=Convolved.Config()).build(16, 2, 8)
