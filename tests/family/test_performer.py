"""Performer: FAVOR+ against performer-pytorch 1.1.4 (golden arrays, float64), its limit, and its draws in training.

Its causal attention with positive features depends on later keys, by the maximum that is subtracted; so features and
attention are compared one by one, and the two together with the definition over all pairs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.learning import Resampled, due_for_resampling
from kinformer.core.model import modules_of
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.mixers.linear import LinearAttention
from kinformer.parts.feature_maps import Favor


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "performer.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def favor(golden, **settings):
    features = Favor.Config(features=16, **settings).build(8).double()
    features.weight.copy_(golden["W"])
    return features


def close(got, want, limit=1e-12):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit * max(1.0, float(want.abs().max()))


def test_positive_features(golden):
    """But for eps, which they add after exp(-|x|^2 / 2) and ours before; and theirs of keys have lost the largest W x
    over all positions, where ours say of every key what is lacking."""
    eps, features = 1e-4, favor(golden, eps=1e-4)
    half = golden["q"].square().sum(-1, keepdim=True) / (2 * 8**0.5)
    close((features.queries(golden["q"]) * 4 - eps) * (-half).exp(), golden["phi_q"] * 4 - eps)
    found, lacking = features.keys(golden["k_causal"])
    largest = (golden["k_causal"] * 8**-0.25 @ golden["W"].T).amax((-1, -2))
    exponentials = (found * 4 - eps) * (lacking - largest.unsqueeze(-1)).exp().unsqueeze(-1)
    close(exponentials, golden["phi_k_causal"] * 4 - eps)


def test_causal_attention_over_their_features(golden):
    """They add 1e-6 to every component of the sum of keys in the denominator."""
    q, k, v = golden["phi_q"], golden["phi_k_causal"], golden["v_causal"]
    begun = LinearState(q.new_zeros(2, 2, 16, 8), q.new_full((2, 2, 16), 1e-6))
    close(linear_attention(q, k, v, begun, eps=0.0)[0], golden["out_softmax_causal"])


def test_relu_features_and_their_gradients(golden):
    features = favor(golden, form="relu", eps=1e-3)
    close(features.queries(golden["q"]), golden["gen_q"])
    inputs = [golden[name].clone().requires_grad_() for name in ("q", "k_causal", "v_causal")]
    begun = LinearState(torch.zeros(2, 2, 16, 8).double(), torch.full((2, 2, 16), 1e-6).double())
    q, (k, _) = features.queries(inputs[0]), features.keys(inputs[1])
    out, _ = linear_attention(q, k, inputs[2], begun, eps=0.0)
    close(out, golden["out_relu_causal"])
    gradients = torch.autograd.grad(out, inputs, golden["grad_out"])
    for name, gradient in zip("qkv", gradients, strict=True):
        close(gradient, golden[f"grad_{name}_relu_causal"], 1e-11)


def attended(form, features, kernel, time=40):
    """A mixer's output, and that of ``kernel`` [heads, time, time] of its queries and keys over all pairs."""
    torch.manual_seed(0)
    feature_map = Favor.Config(features=features, form=form)
    options = {"floor": 1e-9} if form == "trigonometric" else {"eps": 1e-30}
    mixer = LinearAttention.Config(num_heads=2, feature_map=feature_map, **options).build(16).double()
    x = torch.randn(1, time, 16, dtype=torch.float64)
    with torch.no_grad():
        got, _ = mixer(Chunk(x), mixer.initial_state(1, dtype=torch.float64))
        q, k, v = mixer.qkv(x)[0].view(time, 3, 2, 8).permute(1, 2, 0, 3)
        weights = kernel(mixer.feature_map, q, k).tril()
        want = mixer.out(((weights / weights.sum(-1, keepdim=True)) @ v).transpose(0, 1).flatten(1))
    return got[0], want


def features_over_all_pairs(feature_map, q, k):
    """phi(x) = exp(u - |x|^2 / 2) + eps exp(max u - |x|^2 / 2), written down as it is."""

    def phi(x):
        x = x * 8**-0.25
        u = x @ feature_map.weight.double().T
        norm = x.square().sum(-1, keepdim=True) / 2
        return (u - norm).exp() + 1e-6 * (u.amax(-1, keepdim=True) - norm).exp()

    return phi(q) @ phi(k).mT


def sines_over_all_pairs(feature_map, q, k):
    def phi(x):
        x = x * 8**-0.25
        u = x @ feature_map.weight.double().T
        return torch.cat([u.sin(), u.cos()], -1) * (x.square().sum(-1, keepdim=True) / 2).exp()

    return phi(q) @ phi(k).mT


@pytest.mark.parametrize(
    ("form", "kernel"), [("positive", features_over_all_pairs), ("trigonometric", sines_over_all_pairs)]
)
def test_the_mixer_is_its_definition_over_all_pairs(form, kernel):
    close(*attended(form, 64, kernel), 1e-10)


@pytest.mark.parametrize("form", ["positive", "trigonometric"])
def test_many_features_are_softmax_attention(form):
    def softmax(_, q, k):
        return (q @ k.mT / 8**0.5).exp()

    few, many = (attended(form, features, softmax) for features in (16, 4096))
    errors = [float((got - want).norm() / want.norm()) for got, want in (few, many)]
    assert errors[1] < 0.05 and 2 * errors[1] < errors[0]


def test_orthogonal_rows_are_as_long_as_gaussian_ones():
    features = Favor.Config(features=40).build(16)
    groups = features.weight[:32].view(2, 16, 16)
    products = groups @ groups.mT
    lengths = products.diagonal(dim1=1, dim2=2)
    assert (products - torch.diag_embed(lengths)).abs().max() < 1e-4
    assert lengths.std() > 1 and abs(float(lengths.mean()) / 16 - 1) < 0.5
    loose = Favor.Config(features=40, orthogonal=False).build(16).weight
    assert (loose @ loose.T).triu(1).abs().max() > 1


def test_what_is_drawn_anew_and_when():
    """Two layers have features of their own; training steps 0, 3, 6, ... want new ones (a resumed run has the same:
    tests/training)."""
    model = kinformer.build("performer", recipe="tiny", set={"layers.*.mixer.feature_map.redraw": 3})
    assert [[len(list(due_for_resampling(modules_of(model, Resampled), step)))] for step in (0, 1, 2, 3)] == [
        [2],
        [0],
        [0],
        [2],
    ]
    maps = [module for _, module in due_for_resampling(modules_of(model, Resampled), 0)]
    for number, module in enumerate(maps):
        module.draw(number)
    first = maps[0].weight.clone()
    assert not torch.equal(first, maps[1].weight)
    maps[0].draw(1)
    assert torch.equal(maps[0].weight, maps[1].weight)
    never = kinformer.build("performer", recipe="tiny", set={"layers.*.mixer.feature_map.redraw": 0})
    assert not list(due_for_resampling(modules_of(never, Resampled), 0))
