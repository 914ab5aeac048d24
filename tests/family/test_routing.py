"""Routing Transformer: the limit in which it sees all of the past, how its centroids learn, and its published form:
routing-transformer 1.6.1 (golden arrays, float64), and how much it leaks."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.learning import OnlineLearner
from kinformer.core.model import modules_of
from kinformer.core.state import pop_aux
from kinformer.mixers.buckets import Centroids, RoutingAttention
from kinformer.runtime.errors import KinformerError

DIM, TIME = 16, 23
WHOLE = RoutingAttention.Config(num_heads=2, local_heads=0, num_clusters=1, window=24)


def mixed(config):
    torch.manual_seed(0)
    mixer = config.build(DIM).double().eval()
    x = torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return mixer, x, mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))[0]


def over_all_pairs(mixer, x):
    q, v = mixer.qkv(x).view(2, TIME, 2, 2, 8).permute(2, 0, 3, 1, 4)
    past = torch.ones(TIME, TIME, dtype=torch.bool).tril(-1)
    past[0, 0] = True
    weights = (q @ normalize(q, dim=-1).mT / 8**0.5).masked_fill(~past, -torch.inf).softmax(-1)
    return mixer.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("window", [24, 1000])
def test_one_cluster_that_holds_the_whole_length_is_attention_over_the_past(window):
    mixer, x, got = mixed(WHOLE.replace(window=window))
    with torch.no_grad():
        assert (got - over_all_pairs(mixer, x)).abs().max() < 1e-12


@pytest.mark.parametrize("change", [{"window": 22}, {"num_clusters": 2}])
def test_one_step_off_the_limit_outputs_differ(change):
    mixer, x, got = mixed(WHOLE.replace(**change))
    with torch.no_grad():
        assert (got - over_all_pairs(mixer, x)).abs().max() > 1e-5


def test_tokens_are_drawn_to_the_centroids_that_they_are_nearest_to():
    """The commitment's cost is a mean over heads and features, summed over tokens, and has a gradient."""
    mixer, x, _ = mixed(WHOLE.replace(num_clusters=4, commitment=0.5))
    _, state = mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))
    key = normalize(mixer.qkv(x).view(2, TIME, 2, 2, 8)[:, :, 0].transpose(1, 2), dim=-1)
    nearest = mixer.centroids.nearest(key @ mixer.centroids.means.mT)
    costs, _ = pop_aux(state)
    assert (costs["commitment"] - 0.5 * (key - nearest).square().mean((1, 3)).sum(1)).abs().max() < 1e-12
    assert torch.autograd.grad(costs["commitment"].sum(), mixer.qkv.weight)[0].any()


def test_clusters_are_learned_in_training_steps_alone(tmp_path):
    """By each step once; evaluation and generation leave them as they are; they are kept with the weights."""
    options = {"recipe": "tiny", "length": 32, "batch_size": 2, "validation_tokens": 256}
    moved = []
    for steps in (1, 2):
        kinformer.train("routing", data="stdlib", out=tmp_path / str(steps), steps=steps, **options)
        model = kinformer.load(tmp_path / str(steps))
        means = [module.means.clone() for module in modules_of(model, OnlineLearner)]
        assert len(means) == 2
        with torch.no_grad():
            model(torch.randint(256, (1, 20)))
        assert all(
            torch.equal(module.means, before)
            for module, before in zip(modules_of(model, OnlineLearner), means, strict=True)
        )
        moved.append(1 - torch.cat(means).norm(dim=-1))
    # From length 1 a centroid shrinks as it turns: mu <- 0.999 mu + 0.001 m.
    assert 0 < float(moved[0].max()) < 0.002 and float(moved[1].max()) > float(moved[0].max())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"window": 7}, "window must be even, two chunks of a cluster, but is 7"),
        ({"local_heads": 2}, "local_heads must be from 0 to below num_heads = 2, but is 2"),
        ({"commitment": -1.0}, "commitment must be 0 or more"),
        ({"num_clusters": 0}, "num_clusters must be 1 or more, but is 0"),
        ({"centroid_decay": 1.5}, "centroid_decay must be from 0 to below 1, but is 1.5"),
    ],
)
def test_refusals(change, sentence):
    with pytest.raises(KinformerError, match=sentence):
        WHOLE.replace(**change)


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "routing_transformer.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


@pytest.fixture
def balanced_attention(monkeypatch):
    """The published form, which is a part of the benchmark of buckets."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("hashing").balanced_attention


def centroids(golden):
    """Theirs, in training mode."""
    found = Centroids(2, 8, 3, 0.999).double()
    found.means.copy_(golden["means"])
    return found


@pytest.mark.parametrize("name", ["shared_causal", "plain"])
def test_parity_with_routing_transformer(golden, balanced_attention, name):
    """Who is in which cluster, outputs, gradients, the commitment's cost, and the centroids after a step. Their top-w
    takes padding for tokens, which is masked behind it."""
    q, v = golden["q"].clone().requires_grad_(), golden["v"].clone().requires_grad_()
    shared, valid = name == "shared_causal", None if name == "shared_causal" else golden["mask"]
    k = normalize(q, dim=-1) if shared else golden["k"]
    units = normalize(q if shared else torch.cat([q, k], 2), dim=-1)
    module = centroids(golden)
    every = module(units)
    similar = (every, None) if shared else (every[:, :, :24], every[:, :, 24:])
    picked = similar[0].topk(8, dim=2).indices.mT
    assert torch.equal(picked, golden[f"{name}.q_indices"])
    y = balanced_attention(q, k, v, similar, 8, valid=valid, causal=shared)
    assert (y - golden[f"{name}.out"]).abs().max() < 1e-12
    gradients = torch.autograd.grad(y, (q, v), golden["grad_out"])
    for letter, gradient in zip("qv", gradients, strict=True):
        assert (gradient - golden[f"{name}.grad_{letter}"]).abs().max() < 1e-11
    cost = 1e-4 * (units - module.nearest(every)).square().mean()
    assert abs(cost.detach() - golden[f"{name}.aux_loss"]) < 1e-18
    module.learn(lambda sums: sums)
    assert (module.means - golden[f"{name}.means_after_update"]).abs().max() < 1e-15
    before = module.means.clone()
    module.learn(lambda sums: sums)
    assert torch.equal(module.means, before)  # nothing was gathered since


def test_of_tokens_that_are_equal_but_for_rounding_the_first_are_taken(balanced_attention):
    generator = torch.Generator().manual_seed(0)
    words = normalize(torch.randn(1, 2, 4, 8, generator=generator, dtype=torch.float64), dim=-1)
    x = words[:, :, torch.randint(4, (40,), generator=generator)]
    means = normalize(torch.randn(2, 8, 3, generator=generator, dtype=torch.float64), dim=1)
    rounded = x * (1 + 1e-15 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    one, other = (balanced_attention(each, each, x, (each @ means, None), 6) for each in (x, rounded))
    assert (one - other).abs().max() < 1e-12


def test_masked_it_leaks(balanced_attention):
    """With other tokens from 48 of 96 on, two fifths of the outputs before them change: clusters take others."""
    generator = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 1, 4, 96, 8, generator=generator, dtype=torch.float64).unbind()
    others = torch.cat([q[:, :, :48], 6 * torch.randn(1, 4, 48, 8, generator=generator, dtype=torch.float64)], 2)
    means = normalize(torch.randn(4, 8, 8, generator=generator, dtype=torch.float64), dim=-1)

    def published(q):
        key = normalize(q, dim=-1)
        return balanced_attention(q, key, v, (key @ means.mT, None), 12, causal=True)[:, :, :48]

    before, after = published(q), published(others)
    changed = (before - after).norm(dim=-1) > 1e-6
    assert float(changed.double().mean()) > 0.4
    assert (before - after).norm() > 0.3 * before.norm()
