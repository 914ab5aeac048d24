"""Reformer's published attention: the contract, transformers 5.23.0 (golden arrays, float64), and how much it leaks."""

from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.kernels.bucketed import bucketed_attention, members
from kinformer.kernels.bucketed.chunked import sorted_attention
from kinformer.mixers.buckets import BidirectionalLSH, normalised
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

MIXERS = {
    "lsh": BidirectionalLSH.Config(num_heads=2, num_buckets=4, chunk_size=4, rounds=3),
    "one bucket": BidirectionalLSH.Config(num_heads=2, num_buckets=1, chunk_size=7, rounds=1, bias=True),
}


def subject(name):
    return EncoderMixerSubject(lambda: MIXERS[name].build(16), num_globals=(0,), global_tokens=False)


@pytest.mark.parametrize("check", [check for check in ENCODER_CHECKS if check not in ("compile", "implementations")])
@pytest.mark.parametrize("name", MIXERS)
def test_contract(name, check):
    ENCODER_CHECKS[check](subject(name))


def test_compiles():
    ENCODER_CHECKS["compile"](subject("lsh"))


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "reformer.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


@pytest.mark.parametrize("name", ["one", "four", "pad"])
def test_parity_with_transformers(golden, name):
    """Buckets from their rotations, outputs and the gradient of the inputs; a causal mask in "one" and "four"."""
    x = golden["x"].clone().requires_grad_()
    q, v = ((x @ golden[f"w.{each}.weight"].T).unflatten(-1, (2, 8)).transpose(1, 2) for each in ("query_key", "value"))
    mixer = BidirectionalLSH.Config(num_heads=2, num_buckets=8, rounds=golden[f"{name}.rotations"].shape[2]).build(16)
    mixer.hashes.rotations = golden[f"{name}.rotations"]
    buckets, valid = mixer.hashes(q), None
    if name == "pad":
        valid = golden["pad.attention_mask"].bool()
    padded = 9 if name == "pad" else 8
    want = golden[f"{name}.buckets"] - padded * torch.arange(buckets.shape[2])[:, None]
    real = torch.ones(2, 32, dtype=torch.bool) if valid is None else valid
    assert torch.equal(buckets.transpose(1, 3)[real], want.transpose(1, 3)[real])
    y = sorted_attention(q, normalised(q), v, buckets, 4, valid=valid, by_row=False, causal=name != "pad")
    y = y.transpose(1, 2).flatten(2)
    assert (y - golden[f"{name}.out"]).abs().max() < 1e-10
    (gradient,) = torch.autograd.grad(y, x, golden["grad_out"])
    assert (gradient - golden[f"{name}.grad_x"]).abs().max() < 1e-9


def test_a_chunk_that_holds_the_text_is_attention_over_all_others():
    mixer = MIXERS["one bucket"].replace(chunk_size=30).build(16).double()
    x = torch.randn(1, 30, 16, dtype=torch.float64)
    q, v = mixer.qv(x)[0].view(30, 2, 2, 8).permute(1, 2, 0, 3)
    scores = (q @ normalised(q).mT).masked_fill(torch.eye(30, dtype=torch.bool), -torch.inf)
    want = mixer.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    assert (mixer(x)[0] - want).abs().max() < 1e-12
    assert (MIXERS["lsh"].build(16).double()(x)[0] - want).abs().max() > 1e-2


def test_masked_it_leaks_and_attention_by_rank_does_not():
    """Tokens from 48 of 96 on are others: masked as published, more than a third of the outputs before them change, by
    a tenth of their size or more in all; cut by rank, none does by a bit."""
    generator = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 1, 4, 96, 8, generator=generator, dtype=torch.float64).unbind()
    rotations = torch.randn(4, 8, 4, generator=generator, dtype=torch.float64)
    others = torch.cat([q[:, :, :48], 6 * torch.randn(1, 4, 48, 8, generator=generator, dtype=torch.float64)], 2)

    def published(q):
        turned = q @ rotations
        buckets = torch.cat([turned, -turned], -1).argmax(-1).unsqueeze(2)
        by_rank = members(buckets, buckets.new_zeros(1, 4, 1, 8), 0, 8)
        masked = sorted_attention(q, normalised(q), v, buckets, 8, causal=True)
        return masked[:, :, :48], bucketed_attention(q, normalised(q), v, by_rank).out[:, :, :48]

    (masked, by_rank), (masked_then, by_rank_then) = published(q), published(others)
    changed = (masked - masked_then).norm(dim=-1) / masked.norm(dim=-1)
    assert float((changed > 1e-6).double().mean()) > 1 / 3
    assert (masked - masked_then).norm() > 0.1 * masked.norm()
    assert torch.equal(by_rank, by_rank_then)


def test_an_encoder_of_it_and_what_it_refuses():
    lsh = {"kind": "lsh", "num_heads": 2, "num_buckets": 4, "chunk_size": 8}
    model = kinformer.build("bert", recipe="tiny", vocab_size=61, set={"layers.*.mixer": lsh}).eval()
    tokens, valid = torch.randint(61, (2, 40)), torch.arange(40) < torch.tensor([[40], [23]])
    alone = model(tokens[1:, :23])
    assert (model(tokens, valid=valid)[1, :23] - alone[0]).abs().max() < 1e-4
    with pytest.raises(
        KinformerError, match="does not support global tokens, as a token sees the tokens of its bucket"
    ):
        model(tokens, kinds=torch.ones_like(tokens))
    with pytest.raises(KinformerError, match="chunk_size must be 1 or more"):
        MIXERS["lsh"].replace(chunk_size=0)
