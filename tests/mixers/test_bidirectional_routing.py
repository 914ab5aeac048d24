"""Clusters of equal size: the contract, routing-transformer 1.6.1 (golden arrays, float64), and how much it leaks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.kernels.bucketed.equal import balanced_attention
from kinformer.mixers.buckets import BidirectionalRouting
from kinformer.parts.bucketing import Centroids
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

MIXERS = {
    "unshared": BidirectionalRouting.Config(num_heads=2, num_clusters=3, window=10),
    "shared": BidirectionalRouting.Config(num_heads=2, num_clusters=4, window=8, shared=True, bias=True),
}

LACKS = {("unshared", "dtype"): "which tokens a cluster takes is decided by digits that bfloat16 has not"}
"""What a mixer lacks, and why."""


def subject(name):
    return EncoderMixerSubject(lambda: MIXERS[name].build(16), num_globals=(0,), global_tokens=False)


@pytest.mark.parametrize("check", [check for check in ENCODER_CHECKS if check not in ("compile", "implementations")])
@pytest.mark.parametrize("name", MIXERS)
def test_contract(name, check):
    if (name, check) not in LACKS:
        ENCODER_CHECKS[check](subject(name))


def test_compiles():
    ENCODER_CHECKS["compile"](subject("unshared"))


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "routing_transformer.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def centroids(golden):
    """Theirs, in training mode."""
    found = Centroids(2, 8, 3, 0.999).double()
    found.means.copy_(golden["means"])
    return found


@pytest.mark.parametrize("name", ["shared_causal", "plain"])
def test_parity_with_routing_transformer(golden, name):
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


def test_one_cluster_that_holds_the_text_is_attention_over_all():
    mixer = MIXERS["unshared"].replace(num_clusters=1, window=30).build(16).double()
    x = torch.randn(1, 30, 16, dtype=torch.float64)
    q, k, v = mixer.qkv(x)[0].view(30, 3, 2, 8).permute(1, 2, 0, 3)
    want = mixer.out(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1) / (1 + 1e-5))
    assert (mixer(x)[0] - want).abs().max() < 1e-12
    less = MIXERS["unshared"].replace(num_clusters=1, window=29).build(16).double()
    less.load_state_dict(mixer.state_dict())
    assert (less(x)[0] - want).abs().max() > 1e-4


@pytest.mark.parametrize("name", MIXERS)
def test_of_equal_tokens_the_first_are_taken_whatever_the_padding(name):
    """Without positions the same word is the same vector everywhere, so that clusters choose among equals."""
    mixer = MIXERS[name].replace(num_clusters=3, window=4).build(16).double()
    words = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = words[torch.randint(4, (3, 40), generator=torch.Generator().manual_seed(1))]
    for length in (5, 9, 17, 31):
        valid = (torch.arange(40) < length).expand(3, -1)
        padded = mixer(x.masked_fill(~valid[..., None], torch.nan), SequenceContext(valid=valid))
        assert (padded[:, :length] - mixer(x[:, :length])).abs().max() < 1e-12


def test_of_tokens_that_are_equal_but_for_rounding_the_first_are_taken():
    generator = torch.Generator().manual_seed(0)
    words = normalize(torch.randn(1, 2, 4, 8, generator=generator, dtype=torch.float64), dim=-1)
    x = words[:, :, torch.randint(4, (40,), generator=generator)]
    means = normalize(torch.randn(2, 8, 3, generator=generator, dtype=torch.float64), dim=1)
    rounded = x * (1 + 1e-15 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    one, other = (balanced_attention(each, each, x, (each @ means, None), 6) for each in (x, rounded))
    assert (one - other).abs().max() < 1e-12


def test_masked_it_leaks():
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


def test_padding_is_not_learned_from():
    mixer = MIXERS["shared"].build(16).double()
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    valid = torch.arange(20) < torch.tensor([[20], [11]])
    x[1, 11:] = torch.nan
    mixer(x, SequenceContext(valid))
    got = mixer.centroids._sums
    mixer.centroids._sums = None
    mixer(x[:1])
    mixer(x[1:, :11])
    assert (got - mixer.centroids._sums).abs().max() < 1e-12


def test_an_encoder_of_it_and_what_it_refuses():
    routing = {"kind": "routing", "num_heads": 2, "num_clusters": 3, "window": 8}
    model = kinformer.build("bert", recipe="tiny", vocab_size=61, set={"layers.*.mixer": routing}).eval()
    tokens = torch.randint(61, (2, 40))
    with pytest.raises(KinformerError, match="has no global tokens, as a token sees the tokens of its clusters"):
        model(tokens, kinds=torch.ones_like(tokens))
    for change, sentence in (
        ({"num_clusters": 0}, "num_clusters must be 1 or more"),
        ({"window": 1}, "window must be 2 or more"),
        ({"centroid_decay": 1.0}, "centroid_decay must be from 0 to below 1"),
    ):
        with pytest.raises(KinformerError, match=sentence):
            MIXERS["shared"].replace(**change)
