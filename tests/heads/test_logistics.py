"""The mixture of discretised logistics: a distribution, the published formula, and draws from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from kinformer.heads.images import LogisticMixture
from kinformer.inputs.images import Pixels
from kinformer.inputs.tokens import Tokens
from kinformer.runtime.errors import KinformerError


def head(mixtures: int = 10, channels: int = 1) -> LogisticMixture:
    input = Pixels.Config(height=2, width=2, channels=channels, joint=channels > 1).build(8)
    return LogisticMixture.Config(mixtures=mixtures).build(8, input)


def parameters(of: LogisticMixture, *shape: int, log_scale: float = -2.0, seed: int = 0) -> Tensor:
    """Logits of means within the range and scales around ``log_scale``, float64."""
    draw = torch.randn(
        *shape, of.output.out_features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    parts = draw.unflatten(-1, (-1, of.config.mixtures))
    parts[..., 1 : 1 + of.channels, :] *= 0.4
    parts[..., 1 + of.channels : 1 + 2 * of.channels, :] += log_scale
    return parts.flatten(-2)


def published(of: LogisticMixture, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """-ln p as PixelCNN++'s code has it, of ``values`` [n, channels], and the masses of the bins."""
    parts = logits.unflatten(-1, (-1, of.config.mixtures))
    weights, means, scales, coefficients = parts.split([1, of.channels, of.channels, of.pairs], dim=-2)
    x = (values.double() / 127.5 - 1)[..., None].expand_as(means)
    coefficients = coefficients.tanh()
    centres = [means[:, 0]]
    if of.channels == 3:
        centres.append(means[:, 1] + coefficients[:, 0] * x[:, 0])
        centres.append(means[:, 2] + coefficients[:, 1] * x[:, 0] + coefficients[:, 2] * x[:, 1])
    centred, scales = x - torch.stack(centres, 1), scales.clamp_min(-7)
    inverse = (-scales).exp()
    plus, minus, middle = inverse * (centred + 1 / 255), inverse * (centred - 1 / 255), inverse * centred
    mass = plus.sigmoid() - minus.sigmoid()
    density = middle - scales - 2 * softplus(middle) - torch.tensor(127.5, dtype=torch.float64).log()
    inside = torch.where(mass > 1e-5, mass.clamp_min(1e-12).log(), density)
    bins = torch.where(x < -0.999, plus - softplus(plus), torch.where(x > 0.999, -softplus(minus), inside))
    return -(log_softmax(weights[:, 0], -1) + bins.sum(1)).logsumexp(-1), mass


@pytest.mark.parametrize("channels", [1, 3])
def test_the_published_formula(channels):
    of = head(channels=channels)
    logits = parameters(of, 500, log_scale=-1.0)
    values = torch.randint(256, (500, channels), generator=torch.Generator().manual_seed(1))
    values[:60], values[60:120] = 0, 255
    expected, mass = published(of, logits, values)
    exact = (mass > 1e-5).all(-1).all(-1) | ((values == 0) | (values == 255)).all(-1)
    found = of.nats(logits, values if channels > 1 else values[:, 0])
    assert exact.sum() > 150
    torch.testing.assert_close(found[exact], expected[exact], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("log_scale", [-9.0, -4.0, 1.0])
def test_all_values_together_have_probability_one(log_scale):
    of = head()
    logits = parameters(of, 20, log_scale=log_scale)
    nats = of.nats(logits[:, None].expand(-1, 256, -1), torch.arange(256).expand(20, -1))
    torch.testing.assert_close((-nats).exp().sum(-1), torch.ones(20, dtype=torch.float64))


def test_colours_together_have_probability_one():
    of = head(mixtures=2, channels=3)
    of.levels = 4
    logits = parameters(of, 3, log_scale=-0.5)
    every = torch.cartesian_prod(*[torch.arange(4)] * 3)
    nats = of.nats(logits[:, None].expand(-1, len(every), -1), every.expand(3, -1, -1))
    torch.testing.assert_close((-nats).exp().sum(-1), torch.ones(3, dtype=torch.float64))


def test_float32_keeps_tails_and_slopes_finite():
    of = head()
    logits = (30 * parameters(of, 64, seed=2)).float().requires_grad_()
    nats = of.nats(logits, torch.arange(64) * 4)
    nats.sum().backward()
    assert nats.isfinite().all() and logits.grad.isfinite().all()
    torch.testing.assert_close(
        nats, of.nats(logits.detach().double(), torch.arange(64) * 4).float(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_draws_follow_the_probabilities(channels):
    of = head(mixtures=3, channels=channels)
    of.levels = 5
    logits = parameters(of, 1, log_scale=-1.0, seed=3).expand(40000, -1)
    uniform = torch.rand(40000, of.draws, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = of.draw(logits, uniform, 1.0).reshape(40000, channels)
    every = torch.cartesian_prod(*[torch.arange(5)] * channels).reshape(-1, channels)
    expected = (-of.nats(logits[: len(every)], every if channels > 1 else every[:, 0])).exp()
    codes = (drawn * 5 ** torch.arange(channels)).sum(-1)
    known = (every * 5 ** torch.arange(channels)).sum(-1)
    shares = torch.bincount(codes, minlength=5**channels)[known] / 40000
    torch.testing.assert_close(shares, expected.float(), atol=0.012, rtol=0)


def test_temperature_nought_takes_the_heaviest_mean():
    of = head(mixtures=2)
    logits = torch.tensor([[0.0, 1.0, 0.5, -0.25, 0.0, 0.0]])
    for seed in range(3):
        uniform = torch.rand(1, 2, generator=torch.Generator().manual_seed(seed))
        assert of.draw(logits, uniform, 0.0).tolist() == [round(0.75 * 127.5)]


def test_it_also_reads_ids_as_numbers_and_refuses_what_are_none():
    of = LogisticMixture.Config(mixtures=2).build(8, Tokens.Config(vocab_size=11).build(8))
    logits = parameters(of, 5)
    nats = of.nats(logits[:, None].expand(-1, 11, -1), torch.arange(11).expand(5, -1))
    torch.testing.assert_close((-nats).exp().sum(-1), torch.ones(5, dtype=torch.float64))
    with pytest.raises(KinformerError, match="one value or three at a position, but the input has 2"):
        LogisticMixture.Config().build(8, Pixels.Config(channels=2, joint=True).build(8))
    with pytest.raises(KinformerError, match="mixtures must be 1 or more"):
        LogisticMixture.Config(mixtures=0)
