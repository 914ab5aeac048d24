"""Linformer: the contract, its formula and its limit, and the numbers of another implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.encoders import Linformer
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

SMALL = Linformer.Config(num_heads=2, rank=6, max_length=36)
MIXERS = {
    "by head": SMALL.replace(sharing="none"),
    "heads share": SMALL,
    "layerwise": SMALL.replace(sharing="keys_values", shared=True),
    "mean": SMALL.replace(method="mean"),
    "max": SMALL.replace(method="max"),
    "convolution": SMALL.replace(method="convolution", sharing="keys_values"),
    "convolution by head": SMALL.replace(method="convolution", sharing="none"),
}
COMPILED = ("heads share", "convolution")


def made(config, dim=16):
    torch.manual_seed(0)
    return config.build(dim).double()


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in MIXERS for check in ENCODER_CHECKS if check != "compile" or name in COMPILED],
)
def test_contract(name, check):
    impls = {"reference": lambda: MIXERS[name].replace(impl="reference").build(16)}
    sizes = (4,) if check == "compile" else (0, 4)
    ENCODER_CHECKS[check](EncoderMixerSubject(lambda: MIXERS[name].build(16), impls=impls, num_globals=sizes))


def by_formula(mixer, x):
    """Equation 7 for one text [time, dim], head by head, with E and F as matrices [rank, time] of the tokens."""
    config, heads, outputs = mixer.config, mixer.num_heads, []
    width, split = config.max_length // config.rank, lambda product: product.weight.view(heads, -1, x.shape[1])
    for head in range(heads):
        keys = []
        for number, product in ((0, mixer.key), (-1, mixer.value)):
            own, bias = split(product)[head], product.bias.view(heads, -1)[head]
            if config.method == "learned":
                weight = mixer.length.weight[number]
                matrix = weight[head if len(weight) > 1 else 0][:, : len(x)]
                keys.append(matrix @ (x @ own.T) + bias)
            elif config.method == "mean":
                keys.append(torch.stack([part.mean(0) @ own.T + bias for part in x.split(width)]))
            elif config.method == "max":
                keys.append(torch.stack([(part @ own.T + bias).amax(0) for part in x.split(width)]))
            else:
                weight = mixer.length.weight[number]
                kernel = weight[head if len(weight) > 1 else 0].unflatten(1, (width, -1))  # [out, token, in]
                parts = [(part @ own.T) for part in x.split(width)]
                keys.append(torch.stack([torch.einsum("oti,ti->o", kernel[:, : len(p)], p) + bias for p in parts]))
        q = x @ split(mixer.query)[head].T + mixer.query.bias.view(heads, -1)[head]
        outputs.append((q @ keys[0].T / q.shape[1] ** 0.5).softmax(-1) @ keys[1])
    return mixer.out(torch.cat(outputs, 1))


@pytest.mark.parametrize("time", [36, 20, 1])
@pytest.mark.parametrize("name", MIXERS)
def test_it_is_its_formula_and_blind_to_padding(name, time):
    mixer, x = made(MIXERS[name]), torch.randn(1, 40, 16, dtype=torch.float64)
    got = mixer(x, SequenceContext(torch.arange(40)[None] < time))
    torch.testing.assert_close(got[0, :time], by_formula(mixer, x[0, :time]), rtol=0, atol=1e-12)
    assert not got[0, time:].any()


@pytest.mark.parametrize("method", ["learned", "mean", "max", "convolution"])
def test_as_many_summaries_as_tokens_are_exact_attention(method):
    plain = made(BidirectionalAttention.Config(num_heads=2))
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    gaps = []
    for rank in (12, 6):
        mixer = made(SMALL.replace(rank=rank, max_length=12, method=method))
        q, k, v = plain.projection.qkv.weight.chunk(3)
        weights = {"query.weight": q, "key.weight": k, "value.weight": v}
        weights |= {name.replace("weight", "bias"): torch.zeros(16) for name in weights}
        weights |= {"out.weight": plain.out.weight, "out.bias": plain.out.bias}
        if method in ("learned", "convolution"):
            own = mixer.length.weight
            weights["length.weight"] = torch.eye(*own.shape[-2:]).expand_as(own)
        mixer.load_state_dict(weights)
        plain.projection.qkv.bias.data.zero_()
        gaps.append(float((mixer(x) - plain(x)).detach().abs().max()))
    assert gaps[0] < 1e-12 and gaps[1] > 1e-3


GOLDEN = Path(__file__).parents[1] / "golden" / "linformer.npz"


def test_it_computes_what_another_implementation_does():
    """linformer 0.2.3, in float64: outputs, and gradients of inputs and of E."""
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        golden = {name: torch.from_numpy(arrays[name]) for name in arrays}
    longest, rank = golden["w.proj_k"].shape
    mixer = made(Linformer.Config(num_heads=int(golden["heads"]), rank=rank, max_length=longest))
    weights = {name: torch.zeros_like(value) for name, value in mixer.state_dict().items()}
    for own, theirs in (("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("out", "to_out")):
        weights[f"{own}.weight"] = golden[f"w.{theirs}.weight"]
    weights["out.bias"] = golden["w.to_out.bias"]
    weights["length.weight"] = torch.stack([golden["w.proj_k"].T, golden["w.proj_v"].T])[:, None]
    mixer.load_state_dict(weights)
    x = golden["x"].requires_grad_()
    got = mixer(x)
    (got * golden["grad_out"]).sum().backward()
    torch.testing.assert_close(got, golden["out"], rtol=0, atol=1e-12)
    torch.testing.assert_close(x.grad, golden["grad_x"], rtol=0, atol=1e-12)
    torch.testing.assert_close(mixer.length.weight.grad[0, 0].T, golden["grad_proj_k"], rtol=0, atol=1e-12)


def test_layers_of_equal_rank_share_one_projection():
    changes = {"layers": 4, "layers.1.mixer.rank": 8, "layers.3.mixer.rank": 8}
    model = configure("linformer", "tiny", 61, changes).build()
    names = [name for name, _ in model.named_parameters() if "length" in name or "shared" in name]
    assert names == ["stack.shared.0.weight", "stack.shared.1.weight"]
    mixers = [layer.mixer for layer in model.stack.layers]
    assert mixers[0].length is mixers[2].length and mixers[1].length is mixers[3].length
    assert (mixers[0].length.weight.shape, mixers[1].length.weight.shape) == ((1, 1, 16, 128), (1, 1, 8, 128))


def test_time_and_memory_are_those_of_the_rank():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for time in (1024, 2048):
        with torch.device("meta"):
            mixer, x = Linformer.Config(rank=64, max_length=4096).build(64), torch.zeros(1, time, 64)
        with FlopCounterMode(display=False) as counter:
            mixer(x)
        counts.append(counter.get_total_flops())
    assert counts[1] < 2 * counts[0]


def test_texts_that_are_too_long_are_refused():
    mixer = made(SMALL)
    with pytest.raises(KinformerError, match="a text of 37 tokens is longer than max_length = 36"):
        mixer(torch.randn(1, 37, 16, dtype=torch.float64))
    model = kinformer.build("bert", recipe="tiny", vocab_size=61, set={"layers.*.mixer": "linformer"})
    assert model.max_length == 128  # of its positions; the mixer's is 512
    model = kinformer.build("linformer", recipe="tiny", vocab_size=61, set={"position": "sinusoidal"})
    assert model.max_length == 128
    with pytest.raises(KinformerError, match="longer than max_length = 128 of the mixer linformer"):
        model(torch.zeros(1, 129, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank must be 1 to max_length = 36, but is 0"),
        ({"rank": 37}, "rank must be 1 to max_length = 36, but is 37"),
        ({"rank": 5, "method": "mean"}, "max_length = 36 is not a multiple of rank = 5"),
        ({"method": "mean", "shared": True}, "shared = True does nothing with method = 'mean'"),
        ({"impl": "flex"}, "knows no queries and keys without an order"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes, message):
    with pytest.raises(KinformerError, match=message):
        SMALL.replace(**changes).build(16)
    assert "linformer" in kinds()["encoder_mixer"]
