"""Scores: their definitions written out, where they reduce to the scaled dot product, and wrong uses."""

import math

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.core.errors import KinformerError
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.positions.shaw import Shaw
from kinformer.scores.additive import Additive
from kinformer.scores.bilinear import Bilinear
from kinformer.scores.dot import Dot
from kinformer.scores.modulus import Modulus
from kinformer.scores.scaled_dot import ScaledDot

DIM, HEADS, WIDTH, TIME = 16, 2, 8, 19


def attention(score, **options):
    torch.manual_seed(0)
    mixer = SoftmaxAttention.Config(num_heads=HEADS, score=score, **options).build(DIM).double()
    with torch.no_grad():
        for weight in mixer.score.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return mixer


def inputs():
    return torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def outputs(mixer, plain=None):
    if plain is not None:
        mixer.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        return mixer(Chunk(inputs()), mixer.initial_state(2))[0]


def dense(mixer, scores):
    """Outputs by a formula of q and k, [batch, heads, time, width]."""
    with torch.no_grad():
        q, k, v = mixer.projection(inputs())
        hidden = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
        y = scores(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v
        return mixer.out(y.transpose(1, 2).flatten(2))


def complex_modulus(q, k):
    q, k = (torch.complex(*x.chunk(2, dim=-1)) for x in (q, k))
    return (q @ k.mT).abs() / 2


FORMULAS = {
    "dot": (Dot.Config(), lambda mixer: lambda q, k: q @ k.mT),
    "bilinear": (
        Bilinear.Config(),
        lambda mixer: lambda q, k: torch.einsum("bhix,hxy,bhjy->bhij", q, mixer.score.weight, k),
    ),
    "additive": (
        Additive.Config(),
        lambda mixer: (
            lambda q, k: torch.einsum("bhijx,hx->bhij", (q[:, :, :, None] + k[:, :, None]).tanh(), mixer.score.weight)
        ),
    ),
    "modulus": (Modulus.Config(), lambda mixer: complex_modulus),
}


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("name", FORMULAS)
def test_score_by_its_formula(name, impl):
    config, formula = FORMULAS[name]
    mixer = attention(config, impl=impl)
    want = dense(mixer, formula(mixer))
    assert (outputs(mixer) - want).abs().max() < 1e-9
    assert (want - outputs(attention(ScaledDot.Config()))).abs().max() > 1e-3


def test_bilinear_begins_as_the_scaled_dot():
    plain = attention(ScaledDot.Config())
    mixer = SoftmaxAttention.Config(num_heads=HEADS, score=Bilinear.Config()).build(DIM).double()
    assert (outputs(mixer, plain) - outputs(plain)).abs().max() < 1e-7


def test_dot_with_queries_divided_is_the_scaled_dot():
    plain, mixer = attention(ScaledDot.Config()), attention(Dot.Config())
    mixer.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for weight in mixer.projection.parameters():
            weight[: HEADS * WIDTH] *= WIDTH**-0.5
    assert (outputs(mixer) - outputs(plain)).abs().max() < 1e-12


def test_modulus_forgets_the_phase():
    """Queries turned by one angle each have the scores that they had."""
    mixer = attention(Modulus.Config())
    want = outputs(mixer)
    with torch.no_grad():
        for weight in mixer.projection.parameters():
            rows = weight[: HEADS * WIDTH].view(HEADS, 2, WIDTH // 2, -1)
            real, imaginary = rows.clone().unbind(1)
            rows.copy_(torch.stack([-imaginary, real], 1))
    assert (outputs(mixer) - want).abs().max() < 1e-9


def test_modulus_of_orthogonal_vectors_has_a_finite_gradient():
    mixer = attention(Modulus.Config())
    with torch.no_grad():
        for weight in mixer.projection.parameters():
            weight.zero_()
    mixer(Chunk(inputs()), mixer.initial_state(2))[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("name", ["dot", "bilinear"])
def test_scores_and_positions_go_together(name):
    """Shaw's vectors move the key that the score sees."""
    config, formula = FORMULAS[name]
    mixer = attention(config, position=Shaw.Config(max_distance=3, on_values=False))
    table = mixer.position.key_table
    distance = (torch.arange(TIME)[:, None] - torch.arange(TIME)).clamp(-3, 3)

    def scores(q, k):
        moved = formula(mixer)(q, k)
        return moved + torch.einsum("bhix,ijx->bhij", mixer.score.queries(q), table[3 - distance])

    assert (outputs(mixer) - dense(mixer, scores)).abs().max() < 1e-12


def test_modulus_needs_pairs():
    with pytest.raises(KinformerError, match="head_dim is 5; make it even"):
        SoftmaxAttention.Config(num_heads=2, head_dim=5, score=Modulus.Config()).build(DIM)
