"""Softmax attention with a decay: flash-linear-attention's naive form, limits, contract, and long texts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from kinformer.core.contract import Chunk
from kinformer.core.pattern import Band
from kinformer.core.probe import weights_of
from kinformer.kernels import attention as decayed
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.decays import Fixed, LowRank, Sigmoid
from kinformer.parts.patterns.sequence import Local, Sinks
from kinformer.parts.projections import Convolved, Grouped, KVShift, MultiHead, Normalised
from kinformer.parts.relative_positions import Alibi, DistanceAware, Shaw
from kinformer.parts.scores import SinkLogit
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, SCORES, built, inputs

GATE = Sigmoid.Config(coupled=False)
PRO = SoftmaxAttention.Config(
    num_heads=4,
    projection=Normalised.Config(inner=KVShift.Config(inner=MultiHead.Config(bias=False)), over="by_head"),
    decay=GATE,
    gate="element",
    head_norm="rms",
    bias=False,
)


def outputs(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))[0]


@pytest.mark.parametrize("impl", ["auto", "chunked", "sdpa", "reference"])
@pytest.mark.parametrize(("name", "behind"), [("y", None), ("window", 3)])
def test_parity_with_flash_linear_attention(monkeypatch, impl, name, behind):
    """naive_forgetting_attn of fla 0.6.0, four heads over two of keys, which computes in float32."""
    with np.load(Path(__file__).parents[1] / "golden" / "forgetting.npz", allow_pickle=False) as arrays:
        golden = {key: torch.from_numpy(arrays[key]).double().transpose(1, 2) for key in arrays}
    visibility, qkv = Visibility(Band(behind=behind)), [golden[key] for key in "qkv"]
    scoring = Scoring(0.5, decay=golden["g"].cumsum(-1))
    for rows in (decayed.ROWS, 4):
        monkeypatch.setattr(decayed, "ROWS", rows)
        found = attention(*qkv, visibility, scoring, impl=impl).out
        torch.testing.assert_close(found, golden[name], rtol=1e-5, atol=1e-6)
    q, *kv = qkv
    one = attention(q[:, :, -1:], *kv, visibility, scoring, impl=impl).out
    torch.testing.assert_close(one, golden[name][:, :, -1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"projection": Grouped.Config(num_kv_heads=2), "score": SinkLogit.Config()},
        {"pattern": Local.Config(window=4), "position": Shaw.Config(max_distance=3)},
        {"projection": KVShift.Config(inner=Grouped.Config(num_kv_heads=2)), "head_norm": "rms", "gate": "element"},
    ],
    ids=["shared keys and a sink", "a window and keys by distance", "shifted keys and values, outputs normalised"],
)
def test_contract(monkeypatch, settings):
    monkeypatch.setattr(decayed, "ROWS", 5)
    config = SoftmaxAttention.Config(decay=GATE, **settings)
    impls = {impl: lambda impl=impl: config.replace(impl=impl).build(DIM) for impl in ("reference", "chunked")}
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2, impls=impls)
    for check in set(CHECKS) - (set() if "gate" in settings else {"compile"}):  # a sink compiles in tests/scores
        CHECKS[check](subject)


def rms(x):
    return x / (x.square().mean() + 1e-6).sqrt()


@torch.no_grad()
def test_the_block_of_pro_is_the_authors_layer_head_by_head():
    """Their ShiftLinear, norms of queries, keys and outputs, forget gate and output gate, one token after the other."""
    mixer, x = built(PRO), inputs(9, batch=1)
    qkv = mixer.projection.inner.inner(x)
    q, k, v = (part[0] for part in qkv)  # [heads, time, width]
    log_f = logsigmoid(mixer.decay.gate(x))[0].T
    alpha, beta = torch.sigmoid(mixer.projection.inner.shift(x))[0].T.chunk(2)
    q_weight, k_weight = (norm.weight.view(4, -1) for norm in (mixer.projection.q_norm, mixer.projection.k_norm))
    gates = torch.sigmoid(mixer.gate.linear(x))[0].unflatten(-1, (4, -1))
    y = torch.zeros(9, 4, q.shape[-1], dtype=x.dtype)
    for head in range(4):
        keys, values = [], []
        for t in range(9):
            before_k, before_v = (part[head, t - 1] if t else torch.zeros_like(part[head, 0]) for part in (k, v))
            shifted = alpha[head, t] * before_k + (1 - alpha[head, t]) * k[head, t]
            keys.append(rms(shifted) * k_weight[head])
            values.append(beta[head, t] * before_v + (1 - beta[head, t]) * v[head, t])
            query = rms(q[head, t]) * q_weight[head]
            fades = torch.stack([log_f[head, j + 1 : t + 1].sum() for j in range(t + 1)])
            p = (torch.stack(keys) @ query / len(query) ** 0.5 + fades).softmax(0)
            y[t, head] = rms(p @ torch.stack(values)) * mixer.head_norm.weight[head] * gates[t, head]
    assert (mixer.out(y.flatten(1)) - outputs(mixer, x)[0]).abs().max() < 1e-6  # the logarithms are float32


def test_where_no_token_asks_for_the_one_before_keys_and_values_are_the_inner_ones():
    config, x = PRO.replace(projection=MultiHead.Config()), inputs(9)
    x[..., 0] = 1
    plain, mixer = built(config), built(config.replace(projection=KVShift.Config()))
    weights = {name.replace("projection.", "projection.inner."): weight for name, weight in plain.state_dict().items()}
    mixer.load_state_dict(weights, strict=False)
    assert (outputs(mixer, x) - outputs(plain, x)).abs().max() > 1e-3
    with torch.no_grad():
        mixer.projection.shift.weight.zero_()[:, 0] = -1e3
    assert (outputs(mixer, x) - outputs(plain, x)).abs().max() < 1e-12


def test_weights_are_those_before_the_norm_of_outputs():
    mixer, x = built(PRO), inputs(9, batch=1)
    read = weights_of(mixer, (Chunk(x), mixer.initial_state(1, dtype=x.dtype)))
    assert (read.weights.sum(-1) - 1).abs().max() < 1e-12
    assert (read.weights @ read.values + read.constant - read.outputs).abs().max() < 1e-12


def test_where_the_gate_is_open_it_is_plain_attention_and_elsewhere_it_is_not():
    config, x = SoftmaxAttention.Config(), inputs(13)
    plain, mixer = built(config), built(config.replace(decay=GATE))
    mixer.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        mixer.decay.gate.weight.zero_()
        mixer.decay.gate.bias.fill_(50.0)
        torch.testing.assert_close(outputs(mixer, x), outputs(plain, x), rtol=1e-12, atol=1e-12)
        mixer.decay.gate.bias.fill_(3.0)
        assert (outputs(mixer, x) - outputs(plain, x)).abs().max() > 1e-4


def test_with_a_constant_decay_it_is_alibi():
    config, x = SoftmaxAttention.Config(), inputs(13)
    mixer, alibi = built(config.replace(decay=Fixed.Config(first=2.0))), built(config.replace(position=Alibi.Config()))
    alibi.load_state_dict(mixer.state_dict(), strict=False)
    slopes = -torch.log1p(-(2.0 ** -(torch.arange(4, dtype=torch.float64) + 2)))
    alibi.position.slopes = lambda: slopes
    assert (outputs(mixer, x) - outputs(alibi, x)).abs().max() < 1e-6  # the logarithms are float32


def test_a_text_that_has_long_faded_takes_no_digits():
    """A sum of a million would leave float32 no more than 1/16 of a score."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 4, generator=generator, dtype=torch.float64)
    c = -torch.rand(1, 2, 40, generator=generator, dtype=torch.float64).cumsum(-1)
    want = attention(q, k, v, Visibility(Band()), Scoring(0.5, decay=c), impl="reference").out
    for time in (40, 1):
        last = q[:, :, -time:].float(), k.float(), v.float()
        found = attention(*last, Visibility(Band()), Scoring(0.5, decay=c - 1e6)).out
        assert (found - want[:, :, -time:]).abs().max() < 1e-5


def test_what_cannot_decay_is_refused():
    for settings, message in (
        ({"decay": Sigmoid.Config()}, "set coupled = false"),
        ({"decay": LowRank.Config()}, "a number for every feature"),
        ({"score": SCORES["additive"]}, "'additive' is not a product"),
        ({"pattern": Sinks.Config(count=2, window=4)}, "leave one out"),
        ({"position": DistanceAware.Config()}, "leave one out"),
        ({"projection": KVShift.Config(inner=Convolved.Config())}, "cannot stand around 'convolved'"),
        ({"head_norm": "layer"}, "head_norm of the mixer 'softmax': 'layer' is not one of"),
    ):
        with pytest.raises(KinformerError, match=message):
            SoftmaxAttention.Config(**{"decay": GATE, **settings}).build(DIM)
