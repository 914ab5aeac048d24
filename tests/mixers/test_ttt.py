"""TTT-Linear: every token's gradient by autograd, its limits, the contract, and mini-batches that begin anywhere."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, pad

from kinformer.core.contract import Chunk
from kinformer.kernels.delta import delta_rule
from kinformer.mixers.ttt import TTTLinear
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

HEADS, WIDTH = 2, DIM // 2


def heads(x):
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def turned(x, angles):
    """Pairs of features turned by ``angles`` [time, pairs]."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(z).flatten(-2)


def projected(mixer, x):
    """q, k, v [batch, heads, time, width] as the paper has them, and eta [batch, heads, time]."""
    size, time, config = mixer.config.mini_batch, x.shape[1], mixer.config
    parts = mixer.qkv(x).split(DIM, -1)
    if config.convolution:
        shared = pad(parts[0], (0, 0, config.convolution - 1, 0))
        weight, bias = mixer.convolution.weight, mixer.convolution.bias
        q, k = (
            bias[i] + sum(weight[b, i] * shared[:, config.convolution - 1 - b :][:, :time] for b in range(len(weight)))
            for i in range(2)
        )
        parts = q, k, parts[1]
    q, k, v = map(heads, parts)
    place = torch.arange(time, dtype=x.dtype) % size
    angles = place[:, None] * 10000 ** (-torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH)
    return turned(q, angles), turned(k, angles), v, config.rate * mixer.rates(x).sigmoid().transpose(1, 2) / WIDTH


def model(mixer, head, x, weights):
    """f(x; W) of one head, for one token."""
    z = torch.cat([x, x.new_ones(1)]) @ weights
    if mixer.inner_norm is not None:
        norm = mixer.inner_norm
        z = layer_norm(z, (WIDTH,), norm.weight[head], norm.bias[head], 1e-6)
    return x + z


def step_by_step(mixer, x):
    """The outputs, by gradients that autograd takes of every token's loss."""
    q, k, v, eta = projected(mixer, x)
    size, outputs = mixer.config.mini_batch, torch.zeros_like(q)
    for b, h in ((b, h) for b in range(len(x)) for h in range(HEADS)):
        weights = mixer.first[h].detach()
        for t in range(x.shape[1]):
            if t % size == 0:
                begun, total = weights, torch.zeros_like(weights)
            leaf = begun.clone().requires_grad_()
            with torch.enable_grad():
                loss = (model(mixer, h, k[b, h, t], leaf) - v[b, h, t]).square().sum() / 2
            total = total + eta[b, h, t] * torch.autograd.grad(loss, leaf)[0]
            weights = begun - (1 / (t % size + 1) + mixer.shares[t % size]).clamp_min(0) * total
            outputs[b, h, t] = model(mixer, h, q[b, h, t], weights)
    y = mixer.norm(outputs.transpose(1, 2).flatten(2))
    return mixer.out(y if mixer.gate is None else y * gelu(mixer.gate(x), approximate="tanh"))


SETTINGS = {
    "as published": {"mini_batch": 4},
    "the Mamba backbone": {"mini_batch": 3, "convolution": 4, "gate": True},
    "one token, without a norm": {"mini_batch": 1, "inner_norm": False, "rate": 0.5},
}


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_parity_with_gradients_of_every_token(settings):
    mixer, x = built(TTTLinear.Config(num_heads=HEADS, **settings)), inputs(11)
    y, _ = mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))
    torch.testing.assert_close(y, step_by_step(mixer, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_contract(settings):
    config = TTTLinear.Config(**settings)
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2)
    skipped = set() if config.gate else {"compile"}  # the backbone of Mamba has all that the others have
    if not config.inner_norm:  # then large keys make the state grow, as they do with the delta rule
        skipped.add("half_precision")
    for check in CHECKS.keys() - skipped:
        CHECKS[check](subject)


def outputs_of_heads(mixer, x):
    """What stands before the norm over all heads, less q."""
    seen = []
    mixer.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))
    q, k, v, eta = projected(mixer, x)
    one = torch.ones_like(q[..., :1])
    return heads(seen[0]) - q, torch.cat([q, one], -1), torch.cat([k, one], -1), v - k, eta


@torch.no_grad()
def test_without_a_norm_it_is_the_delta_rule_or_linear_attention():
    x = inputs(13)
    mixer = built(TTTLinear.Config(num_heads=HEADS, mini_batch=1, inner_norm=False))
    mixer.first.zero_()
    z, q, k, v, eta = outputs_of_heads(mixer, x)
    beta, start = eta * (1 + mixer.shares), torch.zeros(len(x), HEADS, WIDTH + 1, WIDTH, dtype=x.dtype)
    torch.testing.assert_close(z, delta_rule(q, k, v, beta, start, impl="reference")[0], rtol=1e-11, atol=1e-12)

    for size, equal in ((13, True), (12, False)):
        mixer = built(TTTLinear.Config(num_heads=HEADS, mini_batch=size, inner_norm=False))
        mixer.first.zero_()
        z, q, k, v, eta = outputs_of_heads(mixer, x)
        shares = (1 / torch.arange(1.0, size + 1, dtype=x.dtype) + mixer.shares).clamp_min(0)[torch.arange(13) % size]
        linear = shares[:, None] * ((q @ k.mT).tril() * eta[:, :, None] @ v)
        assert torch.allclose(z, linear, rtol=1e-11, atol=1e-12) == equal


@torch.no_grad()
def test_sequences_of_a_row_begin_their_mini_batches_anew():
    """More sequences than a row without resets has mini-batches, and rows at different places."""
    mixer, x = built(TTTLinear.Config(num_heads=HEADS, mini_batch=4)), inputs(12)
    reset = torch.zeros(2, 12, dtype=torch.bool)
    reset[0, [1, 2, 4, 9]] = reset[1, [3]] = True
    start = mixer.initial_state(2, dtype=torch.float64)
    y, state = mixer(Chunk(x, reset=reset), start)
    for row, ends in enumerate(([0, 1, 2, 4, 9, 12], [0, 3, 12])):
        for begin, end in zip(ends, ends[1:], strict=False):
            alone, last = mixer(Chunk(x[row : row + 1, begin:end]), mixer.initial_state(1, dtype=torch.float64))
            torch.testing.assert_close(y[row : row + 1, begin:end], alone)
        for leaf, expected in zip(state, last, strict=True):
            torch.testing.assert_close(leaf[row : row + 1], expected)


@torch.no_grad()
def test_the_state_learns_in_float32_under_autocast():
    mixer, x = built(TTTLinear.Config(num_heads=HEADS)).float(), inputs(20).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(Chunk(x), mixer.initial_state(len(x)))
    assert state.learned.dtype == state.gradient.dtype == torch.float32 and y.dtype == torch.bfloat16
    assert not torch.equal(state.learned, state.learned.bfloat16().float())
