"""Sparse Sinkhorn attention: the contract, its formula and its limits, and the numbers of another implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.sinkhorn import SinkhornAttention, sinkhorn
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

SMALL = SinkhornAttention.Config(num_heads=2, block=5, max_length=40)
MIXERS = {"blocks": SMALL, "cut": SMALL.replace(cut=2)}


def made(config, dim=16, spread=1.0):
    """In float64 and eval mode; ``spread``: how unlike the sort logits are."""
    torch.manual_seed(0)
    mixer = config.build(dim).double().eval()
    mixer.sorting.outer.weight.data.mul_(spread)
    return mixer


@pytest.mark.parametrize("check", ENCODER_CHECKS)
@pytest.mark.parametrize("name", MIXERS)
def test_contract(name, check):
    impls = {"reference": lambda: MIXERS[name].replace(impl="reference").build(16)}
    subject = EncoderMixerSubject(lambda: MIXERS[name].build(16), impls=impls, num_globals=(0,), global_tokens=False)
    ENCODER_CHECKS[check](subject)


def balanced(logits, iterations):
    found = logits.exp()
    for _ in range(iterations):
        found = found / found.sum(1, keepdim=True)
        found = found / found.sum(0, keepdim=True)
    return found


def by_formula(mixer, x):
    """One text [time, dim], head by head, block by block and slot by slot."""
    config, blocks = mixer.config, x.split(mixer.config.block)
    count, every = len(blocks), []
    qkv = mixer.projection(x[None])
    summed = torch.stack([block.sum(0) for block in blocks])
    logits = mixer.sorting.outer(mixer.sorting.inner(summed).relu()).unflatten(1, (config.num_heads, -1))
    for head in range(config.num_heads):
        q, k, v = (each[0, head].split(config.block) for each in qkv)
        weights = balanced(logits[:, head, :count] / config.temperature, config.iterations)

        def brought(i, parts, weights=weights):
            slots = []
            for slot in range(len(parts[0])):
                having = [j for j in range(count) if slot < len(parts[j])]
                scale = weights[i].sum() / weights[i, having].sum()
                slots.append(scale * sum(weights[i, j] * parts[j][slot] for j in having))
            return torch.stack(slots)

        sorted_k, sorted_v = ([brought(i, parts) for i in range(count)] for parts in (k, v))
        outputs = []
        for i in range(count):
            keys, values = (sorted_k[i], k[i]), (sorted_v[i], v[i])
            if config.cut:
                keys, values = sorted_k[: config.cut], sorted_v[: config.cut]
            outputs.append((q[i] @ torch.cat([*keys]).T * mixer.scale).softmax(-1) @ torch.cat([*values]))
        every.append(torch.cat(outputs))
    return mixer.out(torch.cat(every, -1))


@pytest.mark.parametrize("time", [20, 18, 7, 3])
@pytest.mark.parametrize("name", MIXERS)
def test_it_is_its_formula_and_blind_to_padding(name, time):
    mixer, x = made(MIXERS[name], spread=4.0), torch.randn(1, 43, 16, dtype=torch.float64)
    want = by_formula(mixer, x[0, :time])
    torch.testing.assert_close(mixer(x[:, :time])[0], want, rtol=0, atol=1e-12)
    got = mixer(x, SequenceContext(torch.arange(43)[None] < time))  # padding beyond max_length, too
    torch.testing.assert_close(got[0, :time], want, rtol=0, atol=1e-12)
    assert got.shape == x.shape and not got[0, time:].any()


@pytest.mark.parametrize("cut", [0, 1])
def test_one_block_is_exact_attention(cut):
    """Its keys are sorted to itself: all are seen twice, or with SortCut once."""
    plain, x = made_plain(), torch.randn(2, 12, 16, dtype=torch.float64)
    gaps = []
    for block in (12, 6):
        mixer = made(SMALL.replace(block=block, max_length=12, cut=cut))
        mixer.load_state_dict(plain.state_dict(), strict=False)
        gaps.append(float((mixer(x) - plain(x)).detach().abs().max()))
    assert gaps[0] < 1e-12 and gaps[1] > 1e-3


def made_plain():
    torch.manual_seed(0)
    return BidirectionalAttention.Config(num_heads=2).build(16).double()


class Exchanged(torch.nn.Module):
    """A sorting that brings every block of two the other one."""

    def forward(self, sums, filled):
        return torch.eye(2, dtype=sums.dtype).flip(0).expand(len(sums), 2, 2, 2)


def test_two_blocks_that_change_places_are_exact_attention():
    """So values are sorted as their keys are: each block sees the other one, and itself."""
    plain, mixer, x = made_plain(), made(SMALL), torch.randn(2, 10, 16, dtype=torch.float64)
    mixer.load_state_dict(plain.state_dict(), strict=False)
    assert (mixer(x) - plain(x)).detach().abs().max() > 1e-3
    mixer.sorting = Exchanged()
    torch.testing.assert_close(mixer(x), plain(x), rtol=0, atol=1e-12)


def test_a_sorting_is_almost_a_permutation_at_a_low_temperature():
    logits = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = sinkhorn(logits / 0.02, 300)
    assert (found.sum(1) - 1).abs().max() < 1e-9 and (found.sum(2) - 1).abs().max() < 1e-2
    assert found.amax(2).min() > 0.9


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "sinkhorn.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def test_the_sorting_is_that_of_another_implementation(golden):
    """sinkhorn-transformer 0.11.4 in float64: one iteration and seven, their gradient, and captured Gumbel noise."""
    logits = golden["r"].clone().requires_grad_()
    torch.testing.assert_close(sinkhorn(logits, 1), golden["sort_1"], rtol=0, atol=1e-12)
    found = sinkhorn(logits, 7)
    (found * golden["grad_sort"]).sum().backward()
    torch.testing.assert_close(found, golden["sort_7"], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits.grad, golden["grad_r"], rtol=0, atol=1e-12)
    noisy = ((golden["r_pos"] + 1e-6).log() + golden["gumbel"]) / 0.75
    torch.testing.assert_close(sinkhorn(noisy, 7), golden["gumbel_sinkhorn"], rtol=0, atol=1e-12)


def test_entries_that_are_not_there_are_left_out_of_the_sums():
    logits = torch.randn(1, 7, 7, dtype=torch.float64)
    pairs = (torch.arange(7)[:, None] < 4) & (torch.arange(7) < 4)
    found = sinkhorn(logits, 5, pairs)
    torch.testing.assert_close(found[0, :4, :4], sinkhorn(logits[:, :4, :4], 5)[0], rtol=0, atol=1e-12)
    assert not found[0, 4:].any() and not found[0, :, 4:].any()


def test_a_causal_mask_would_leak_through_the_sums_of_columns():
    """Why there is no causal form: where block i may take the blocks before it alone, what it takes of one is divided
    by what later blocks take, too."""
    logits = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    later, past = logits.clone(), torch.ones(6, 6, dtype=torch.bool).tril(-1)
    later[5] = logits[5] * 6
    before, after = (sinkhorn(each, 5, past) for each in (logits, later))
    assert not before[past.logical_not()].any()
    assert (after - before)[:5].abs().max() > 0.05


def test_noise_is_the_seeds_and_of_training_alone():
    mixer, x = made(SMALL), torch.randn(1, 20, 16, dtype=torch.float64)
    quiet = mixer(x)
    assert torch.equal(quiet, mixer(x))
    mixer.train()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(mixer(x))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], quiet)
    without = made(SMALL.replace(noise=False)).train()
    assert torch.equal(without(x), quiet)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SMALL.replace(block=0), "block must be 1 or more, but is 0"),
        (lambda: SMALL.replace(block=7), "max_length = 40 is not a multiple of block = 7"),
        (lambda: SMALL.replace(temperature=0.0), "temperature"),
        (lambda: made(SMALL)(torch.zeros(1, 41, 16).double()), "41 tokens is longer than max_length = 40 of the mixer"),
        (
            lambda: kinformer.build("sinkhorn", recipe="tiny", set={"global_tokens": 1}),
            "sorts blocks and does not support",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(make, message):
    with pytest.raises(KinformerError, match=message):
        make()
