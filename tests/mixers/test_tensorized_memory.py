"""Tensorized attention with a memory of segments: contract, definition by loops, limits, its authors' numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.contract import Chunk
from kinformer.family.kinds import kinds
from kinformer.mixers.tensorized import TensorizedAttention, TensorizedMemory
from kinformer.parts.positions import sinusoids
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject, verify_config

DIM = 8
SMALL = TensorizedMemory.Config(rank=3, blocks=2, segment=5, memory=4)
MIXERS = {"memory": SMALL, "content alone, no memory": SMALL.replace(positions=False, blocks=1, memory=0)}


def made(config, dim=DIM):
    torch.manual_seed(0)
    mixer = config.build(dim).double()
    with torch.no_grad():
        mixer.query_bias.normal_()
    return mixer


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "implementations"])
@pytest.mark.parametrize("name", MIXERS)
def test_contract(name, check):
    CHECKS[check](MixerSubject(lambda: MIXERS[name].build(DIM), dim=DIM))


def test_it_survives_a_file():
    verify_config(SMALL, kinds(), dim=DIM, subject=lambda config: MixerSubject(lambda: config.build(DIM), dim=DIM))


@pytest.mark.parametrize("name", MIXERS)
def test_it_is_the_tensor_of_the_window_with_the_norm_before_it(name):
    mixer, x = made(MIXERS[name]), torch.randn(2, 17, DIM, dtype=torch.float64)
    norm = nn.LayerNorm(DIM).double()
    y, _ = mixer(Chunk(x), mixer.initial_state(2, dtype=x.dtype), norm)
    q, k, v = mixer.qkv(norm(x)).chunk(3, -1)
    core, slots = mixer.core.mean(0), mixer.memory + mixer.segment
    for row in range(2):
        for i in range(17):
            start = i // mixer.segment * mixer.segment - mixer.memory
            want = 0
            for j in range(max(start, 0), i + 1):
                left = core * (q[row, i] + mixer.query_bias[0]) * k[row, j]
                if mixer.position is not None:
                    p = mixer.position(sinusoids(torch.tensor([slots - 1 - (j - start)]), DIM, 10000.0)[0])
                    left = left + core * (q[row, i] + mixer.query_bias[1]) * p
                for other in range(max(start, 0), i + 1):
                    want = want + mixer.pairs[:, j - start, other - start] * (left @ v[row, other])
            assert (y[row, i] - want).abs().max() < 1e-12


def test_a_segment_without_memory_is_tensorized_attention_and_no_gradient_reaches_an_earlier_one():
    plain = made(TensorizedAttention.Config(rank=3, max_length=20))
    x = torch.randn(2, 20, DIM, dtype=torch.float64, requires_grad=True)
    want, _ = plain(Chunk(x), plain.initial_state(2, dtype=x.dtype))
    for segment, memory, same in ((20, 0, True), (10, 10, False)):
        mixer = made(TensorizedMemory.Config(rank=3, segment=segment, memory=memory))
        mixer.load_state_dict(plain.state_dict())
        y, _ = mixer(Chunk(x), mixer.initial_state(2, dtype=x.dtype))
        assert ((y - want).abs().max() < 1e-12) == same
    (gradient,) = torch.autograd.grad(y[:, 15].sum(), x)
    assert (gradient[:, :10] == 0).all() and (gradient[:, 10:16] != 0).any(-1).all()
    assert (gradient[:, 16:] == 0).all()
    changed = x.detach().clone()
    changed[:, 3] += 1  # which its memory sees all the same
    other, _ = mixer(Chunk(changed), mixer.initial_state(2, dtype=x.dtype))
    assert (other[:, 15] - y[:, 15]).abs().max() > 1e-6


def test_its_last_token_is_that_of_its_authors_with_four_tokens_and_three_of_memory(monkeypatch):
    """Their class hides nothing, so that its last token alone sees what ours does."""
    with np.load(Path(__file__).parents[1] / "golden" / "tensorized.npz", allow_pickle=False) as arrays:
        golden = {name: torch.from_numpy(arrays[name]) for name in arrays}
    monkeypatch.setattr("kinformer.mixers.tensorized.sinusoids", lambda *_: golden["r"])
    length, batch, dim = golden["w_in"].shape
    mixer = TensorizedMemory.Config(rank=int(golden["d_head"]), segment=4, memory=3).build(dim).double()
    weights = {"qkv.weight": "w.dec_attn.qkv_net.weight", "position.weight": "w.dec_attn.r_net.weight"}
    state = {ours: golden[theirs] for ours, theirs in weights.items()} | {"core": golden["w.dec_attn.core_value"]}
    biases = torch.stack([golden["r_w_bias"], golden["r_r_bias"]])
    pairs = golden["w.dec_attn.o_net.weight"].view(dim, length, length)
    mixer.load_state_dict(state | {"query_bias": biases, "pairs": pairs})
    x = torch.cat([torch.ones(batch, 1, dim, dtype=torch.float64), golden["w_in"].transpose(0, 1)], 1)
    y, _ = mixer(Chunk(x), mixer.initial_state(batch, dtype=x.dtype))
    norm = [golden[f"w.dec_attn.layer_norm.{kind}"] for kind in ("weight", "bias")]
    got = nn.functional.layer_norm(x[:, -1] + y[:, -1], (dim,), *norm)
    assert (got - golden["attn_out"][-1]).abs().max() < 1e-11


def test_its_recipe_generates_beyond_every_window_and_what_does_not_fit_is_one_sentence():
    model = kinformer.build("tensorized", recipe="tiny-memory").eval()
    tokens = torch.randint(256, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, _ = model(tokens)
        _, state = model(tokens[:, :-1])
        got, _ = model(tokens[:, -1:], state)
    assert (got[:, 0] - want[:, -1]).abs().max() < 1e-4
    for changes, message in (({"segment": 0}, "segment must be 1"), ({"memory": -1}, "memory must be 0")):
        with pytest.raises(KinformerError, match=message):
            SMALL.replace(**changes)
