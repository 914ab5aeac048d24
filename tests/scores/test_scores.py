"""Scores: their definitions written out, where they reduce to the scaled dot product, and wrong uses."""

import math

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.core.parts import Relative
from kinformer.core.pattern import Band
from kinformer.kernels import attention as kernels
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.memory import SegmentMemory
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Causal, Local
from kinformer.parts.positions import NoPosition
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Shaw, TransformerXL, sinusoids
from kinformer.parts.scores import Additive, Bilinear, Capped, Dot, Modulus, ScaledDot
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject
from tests.mixers.made import SCORES

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
    "scaled_dot": (ScaledDot.Config(scale=0.7), lambda mixer: lambda q, k: 0.7 * (q @ k.mT)),
    "capped": (
        Capped.Config(cap=0.5, scale=0.7),
        lambda mixer: lambda q, k: 0.5 * (0.7 * (q @ k.mT) / 0.5).tanh(),
    ),
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


def test_a_cap_far_above_all_scores_is_the_scaled_dot():
    plain, capped = attention(ScaledDot.Config()), attention(Capped.Config(cap=1e6))
    assert (outputs(capped, plain) - outputs(plain)).abs().max() < 1e-9
    with pytest.raises(KinformerError, match="cap must be above 0"):
        Capped.Config(cap=0.0)


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


@pytest.mark.parametrize("name", ["scaled_dot", "dot", "bilinear"])
def test_xl_positions_go_with_every_score_of_products(name):
    """score(q + u, k) + score(q + v, r_d): both sums are taken as the score takes queries, and scaled as it scales."""
    mixer = attention(SCORES[name], position=TransformerXL.Config())
    position, generator = mixer.position, torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in position.biases.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    u, v = (each[:, None] for each in (position.biases.content, position.biases.position))
    distance = (torch.arange(TIME)[:, None] - torch.arange(TIME)).clamp_min(0)

    def scores(q, k):
        r = position.projection(sinusoids(distance.flatten(), DIM, 10000.0)).view(TIME, TIME, HEADS, WIDTH)
        by_content = mixer.score.queries(q + u) @ k.mT
        by_position = torch.einsum("bhix,ijhx->bhij", mixer.score.queries(q + v), r)
        return (by_content + by_position) * mixer.score.scale

    want = dense(mixer, scores)
    assert (outputs(mixer) - want).abs().max() < 1e-12
    one_by_one, state = [], mixer.initial_state(2, dtype=torch.float64)
    with torch.no_grad():
        for token in inputs().split(1, dim=1):
            y, state = mixer(Chunk(token), state)
            one_by_one.append(y)
    assert (torch.cat(one_by_one, 1) - want).abs().max() < 1e-12


BY_DISTANCE = {
    "shaw": Shaw.Config(max_distance=3),
    "xl": TransformerXL.Config(clamp=7),
    "t5": T5.Config(num_buckets=8, max_distance=12),
    "alibi": Alibi.Config(),
    "distance_aware": DistanceAware.Config(),
}


@pytest.mark.parametrize("position", BY_DISTANCE)
@pytest.mark.parametrize("score", SCORES)
def test_scores_and_distances_are_one_in_all_kernels_or_refused(score, position):
    """The reference, the tiles (full and sparse patterns) and single queries agree on outputs and gradients."""

    def make(impl, pattern):
        config = SoftmaxAttention.Config(
            num_heads=HEADS, score=SCORES[score], position=BY_DISTANCE[position], pattern=pattern, impl=impl
        )
        return lambda: config.build(DIM)

    if score in ("capped", "modulus", "additive") and position in ("shaw", "xl"):
        for mixer in (SoftmaxAttention, SegmentMemory, BidirectionalAttention):
            with pytest.raises(KinformerError, match=f"'{score}' is not a product of a query and a key"):
                mixer.Config(num_heads=HEADS, score=SCORES[score], position=BY_DISTANCE[position]).build(DIM)
        return
    for pattern in (Causal.Config(), Local.Config(window=5)):
        impls = {impl: make(impl, pattern) for impl in ("reference", "chunked")}
        subject = MixerSubject(make("auto", pattern), dim=DIM, batch=2, time=TIME, impls=impls)
        for check in ("implementations", "partition"):
            CHECKS[check](subject)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("position", ["none", "t5", "alibi"])
@pytest.mark.parametrize("score", ["scaled_dot", "dot", "bilinear", "sink_logit"])
def test_kernels_of_torch_say_the_same_where_they_are_allowed(score, position):
    places = BY_DISTANCE | {"none": NoPosition.Config()}
    want = outputs(attention(SCORES[score], position=places[position], impl="reference"))
    for impl in ("sdpa", "flex"):
        if impl == "sdpa" and position != "none":
            with pytest.raises(KinformerError, match="knows no tables by distance"):
                attention(SCORES[score], position=places[position], impl=impl)
            continue
        got = outputs(attention(SCORES[score], position=places[position], impl=impl))
        assert (got - want).abs().max() < 1e-12


def test_keys_by_distance_are_refused_by_the_kernels_too():
    q = torch.zeros(1, 2, 3, 4)
    relative = Relative(0, keys=torch.zeros(2, 3, 4))
    with pytest.raises(KinformerError, match="keys by distance with scores of the form modulus"):
        kernels.attention(q, q, q, kernels.Visibility(Band()), kernels.Scoring(1.0, "modulus", relative=relative))


def test_modulus_needs_pairs():
    with pytest.raises(KinformerError, match="head_dim is 5; make it even"):
        SoftmaxAttention.Config(num_heads=2, head_dim=5, score=Modulus.Config()).build(DIM)
