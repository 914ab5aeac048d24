"""PaTH attention: the recurrence of the paper key by key, its limit, the contract, and blocks of tokens."""

import pytest
import torch
from torch.nn.functional import normalize, silu

from kinformer.core.contract import Chunk
from kinformer.mixers import path
from kinformer.mixers.path import PathAttention, Tokens, householder_attention
from kinformer.parts.decays import LowRank, Sigmoid
from kinformer.parts.projections import Convolved, Grouped
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

GATE = Sigmoid.Config(coupled=False)


@torch.no_grad()
@pytest.mark.parametrize("decay", [None, GATE], ids=["path", "path with forget gates"])
def test_parity_with_the_recurrence(decay):
    """Formulas of section 3.1, written out for every pair: the product of all matrices between key and query."""
    mixer, x = built(PathAttention.Config(num_heads=2, rank=5, decay=decay)), inputs(9)
    y, _ = mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))
    time, heads, width = x.shape[1], 2, DIM // 2
    q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in mixer.projection.qkv(x).chunk(3, -1))
    low = mixer.directions(x)
    before = torch.nn.functional.pad(low, (0, 0, 2, 0))
    weight = mixer.convolution.weight.reshape(3, -1)
    w = silu(sum(weight[b] * before[:, 2 - b : 2 - b + time] for b in range(3)))
    w = normalize(w.unflatten(-1, (heads, width)).transpose(1, 2), dim=-1)
    beta = 2 * mixer.strength(x).sigmoid().transpose(1, 2)
    gates = torch.zeros(len(x), heads, time, dtype=x.dtype) if decay is None else mixer.decay(x)
    expected = torch.zeros_like(q)
    for b, h in ((b, h) for b in range(len(x)) for h in range(heads)):
        for i in range(time):
            product, scores = torch.eye(width, dtype=x.dtype), []
            for j in range(i, -1, -1):
                scores.append(q[b, h, i] @ product @ k[b, h, j] / width**0.5 + gates[b, h, j + 1 : i + 1].sum())
                u = w[b, h, j]
                product = product @ (torch.eye(width, dtype=x.dtype) - beta[b, h, j] * torch.outer(u, u))
            expected[b, h, i] = torch.stack(scores).softmax(0) @ v[b, h, : i + 1].flip(0)
    torch.testing.assert_close(y, mixer.out(expected.transpose(1, 2).flatten(2)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decay": GATE, "projection": Grouped.Config(num_kv_heads=2), "rank": None},
        {"convolution": 0},
    ],
    ids=["as published", "shared keys and forget gates", "without a convolution"],
)
def test_contract(monkeypatch, settings):
    monkeypatch.setattr(path, "BLOCK", 5)
    config = PathAttention.Config(**settings)
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2)
    for check in CHECKS:
        if check != "compile" or "decay" in settings:  # which has all that the others have
            CHECKS[check](subject)


def reference(tokens, past, v, sums):
    """Every token multiplies all earlier keys by its matrix."""
    keys, outputs = past, []
    group = tokens.q.shape[1] // past.shape[1]
    for t in range(tokens.q.shape[2]):
        w, beta = tokens.w[:, :, t : t + 1], tokens.beta[:, :, t, None, None]
        keys = torch.cat([keys - beta * (keys @ w.mT) @ w, tokens.k[:, :, t : t + 1]], dim=2)
        scores = tokens.q[:, :, t : t + 1] @ keys.repeat_interleave(group, 1).mT
        place = past.shape[2] + t
        if sums is not None:
            scores = scores + (sums[:, :, place : place + 1] - sums[:, :, : place + 1].mT).to(scores.dtype)
        distance = place - torch.arange(place + 1, device=scores.device)
        visible = distance <= tokens.positions[:, t, None]
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        outputs.append(weights @ v[:, :, : place + 1].repeat_interleave(group, 1))
    return torch.cat(outputs, dim=2), keys


def test_blocks_of_any_size_are_the_reference(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    positions = torch.tensor([[4, 5, 6, 7, 8, 9, 10], [1, 2, 0, 1, 2, 3, 4]])
    beta = 2 * draw(2, 2, 7).sigmoid()
    tokens = Tokens(draw(2, 4, 7, 3), draw(2, 2, 7, 3), normalize(draw(2, 2, 7, 3), dim=-1), beta, positions)
    past, v, sums = draw(2, 2, 4, 3), draw(2, 2, 11, 3), -draw(2, 4, 11, 1).abs().cumsum(2)
    for gates in (None, sums):
        expected = reference(tokens, past, v, gates)
        for block in (1, 3, 64):
            monkeypatch.setattr(path, "BLOCK", block)
            torch.testing.assert_close(householder_attention(tokens, past, v, gates), expected)


@torch.no_grad()
def test_with_beta_0_it_is_softmax_attention_without_positions():
    mixer, x = built(PathAttention.Config(num_heads=2)), inputs(9)
    mixer.strength.weight.zero_()
    mixer.strength.bias.fill_(-800.0)
    y, _ = mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))
    q, k, v = mixer.projection(x)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(y, mixer.out(heads.transpose(1, 2).flatten(2)), rtol=1e-12, atol=1e-12)


def test_the_backward_pass_computes_scores_again(monkeypatch):
    """Memory between forward and backward holds no tensor of [time, time]."""
    time = 4 * path.BLOCK
    mixer, sizes = PathAttention.Config(num_heads=2).build(DIM), []
    x = torch.randn(1, time, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: sizes.append(saved.numel()) or saved, lambda saved: saved
    ):
        y, _ = mixer(Chunk(x), mixer.initial_state(1))
    assert max(sizes) < 2 * time * path.BLOCK
    y.sum().backward()
    assert x.grad.abs().sum() > 0


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(KinformerError, match="a number for every feature"):
        PathAttention.Config(decay=LowRank.Config()).build(DIM)
    with pytest.raises(KinformerError, match="looks at earlier tokens"):
        PathAttention.Config(projection=Convolved.Config()).build(DIM)


@torch.no_grad()
def test_autocast_does_not_round_keys():
    """Every token changes all keys, so that roundings would add up."""
    mixer, x = built(PathAttention.Config(num_heads=2)).float(), inputs(90).float()
    with torch.autocast("cpu", torch.bfloat16):
        _, state = mixer(Chunk(x[:, :1]), mixer.initial_state(len(x)))
        _, state = mixer(Chunk(x[:, 1:]), state)
    rounded = state.cache.k.bfloat16().float()
    assert state.cache.k.dtype == torch.float32 and not torch.equal(state.cache.k[:, :, :8], rounded[:, :, :8])


def test_transforms_of_blocks():
    mixer = built(PathAttention.Config(num_heads=2))
    x = torch.randn(1, path.BLOCK + 3, DIM, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return mixer(Chunk(x), mixer.initial_state(1, dtype=torch.float64))[0].square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), torch.autograd.grad(loss(x), x)[0])
