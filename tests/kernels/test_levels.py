"""Log-linear attention: the authors' results, its formula pair by pair, linear attention in its limit, any cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.kernels.linear import levels as levels_module
from kinformer.kernels.linear.levels import LeveledTokens, leveled_attention

TIME = 150


def example(levels, seed=0):
    """Tokens of two rows and two heads, in float64, from the beginning of their sequences."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, TIME, n, generator=generator, dtype=torch.float64) for n in (4, 4, 3))
    scales = functional.softplus(torch.randn(2, 2, TIME, levels + 1, generator=generator, dtype=torch.float64))
    decay = -functional.softplus(torch.randn(2, 2, TIME, generator=generator, dtype=torch.float64)) / 5
    return LeveledTokens(q, k, v, scales, decay, torch.arange(TIME).expand(2, -1), None, None)


def run(tokens, cuts=(), **options):
    """Outputs and the state of tokens in chunks that end at ``cuts``."""
    levels = tokens.scales.shape[3] - 1
    state, seen = tokens.v.new_zeros(2, 2, 4 * levels, 3), torch.zeros(2, dtype=torch.int64)
    outputs = []
    for begin, end in zip((0, *cuts), (*cuts, TIME), strict=True):
        part = cut(tokens, begin, end)
        y, state = leveled_attention(part, state, seen, **options)
        seen = seen + end - begin
        outputs.append(y)
    return torch.cat(outputs, 2), state


def cut(tokens, begin, end):
    heads = [None if x is None else x[:, :, begin:end] for x in tokens[:5]]
    return LeveledTokens(*heads, *(None if x is None else x[:, begin:end] for x in tokens[5:]))


def pair_by_pair(tokens, levels):
    y, sums = torch.zeros_like(tokens.v), tokens.log_decay.cumsum(2)
    for t in range(TIME):
        for s in range(t + 1):
            level = min((t ^ s).bit_length(), levels)
            weight = tokens.scales[:, :, t, level] * (sums[:, :, t] - sums[:, :, s]).exp()
            y[:, :, t] += (weight * (tokens.q[:, :, t] * tokens.k[:, :, s]).sum(-1)).unsqueeze(-1) * tokens.v[:, :, s]
    return y


def test_parity_with_the_authors():
    """naive_log_linear_attn of flash-linear-attention, 100 tokens."""
    path = Path(__file__).parents[1] / "golden" / "log_linear.npz"
    with np.load(path, allow_pickle=False) as arrays:
        known = {name: torch.from_numpy(arrays[name]).transpose(1, 2) for name in arrays.files}
    positions = torch.arange(100).expand(2, -1)
    tokens = LeveledTokens(
        known["q"], known["k"], known["v"], known["scales"], known["log_decay"], positions, None, None
    )
    y, _ = leveled_attention(tokens, known["q"].new_zeros(2, 2, 4 * 7, 3), torch.zeros(2, dtype=torch.int64))
    assert (y - known["o"]).abs().max() < 1e-12


@pytest.mark.parametrize("levels", [1, 3, 8, 12])
def test_every_pair_counts_by_its_level(levels):
    tokens = example(levels)
    want = pair_by_pair(tokens, levels)
    for options in ({}, {"impl": "reference"}, {"cuts": (1, 2, 7, 64, 65, 130)}):
        y, state = run(tokens, **options)
        assert (y - want).abs().max() < 1e-12 * float(want.abs().max())
        assert state.shape == (2, 2, 4 * levels, 3)
        assert (state - run(tokens)[1]).abs().max() < 1e-12 * float(state.abs().max())


def test_it_is_linear_attention_where_all_levels_weigh_one():
    tokens = example(5)
    tokens = tokens._replace(scales=torch.ones_like(tokens.scales))
    y, state = run(tokens)
    nothing = LinearState(tokens.v.new_zeros(2, 2, 4, 3), tokens.v.new_zeros(2, 2, 4))
    want, after = linear_attention(tokens.q, tokens.k, tokens.v, nothing, log_decay=tokens.log_decay, eps=None)
    assert (y - want).abs().max() < 1e-12 * float(want.abs().max())
    assert (state.unflatten(2, (5, 4)).sum(2) - after.s).abs().max() < 1e-12 * float(after.s.abs().max())
    other = run(tokens._replace(scales=tokens.scales * torch.tensor([1.0, 1, 1, 0, 1, 1])))[0]
    assert (other - want).abs().max() > 1e-3


def test_decays_of_tokens_that_forget_nothing_have_a_gradient():
    """The exponent between such tokens is exactly 0, where the exponents of hidden pairs begin."""
    tokens = example(5)
    decay = (tokens.log_decay * (torch.arange(TIME) % 3 == 0)).requires_grad_()
    tokens = tokens._replace(scales=torch.ones_like(tokens.scales), log_decay=decay)
    nothing = LinearState(tokens.v.new_zeros(2, 2, 4, 3), tokens.v.new_zeros(2, 2, 4))
    want, _ = linear_attention(tokens.q, tokens.k, tokens.v, nothing, log_decay=decay, eps=None, impl="reference")
    slopes = [torch.autograd.grad(y.square().sum(), decay)[0] for y in (run(tokens)[0], want)]
    assert (slopes[0] - slopes[1]).abs().max() < 1e-12 * float(slopes[1].abs().max())


def test_a_state_holds_its_levels_and_nothing_else():
    """After 100 = 64 + 32 + 4 tokens levels 7, 6 and 3 hold something; of four levels the last one holds the rest."""
    tokens = cut(example(9), 0, 100)
    _, state = leveled_attention(tokens, tokens.v.new_zeros(2, 2, 36, 3), torch.zeros(2, dtype=torch.int64))
    held = state.unflatten(2, (9, 4)).abs().amax((0, 1, 3, 4)) > 0
    assert held.nonzero().flatten().tolist() == [2, 5, 6]
    few = tokens._replace(scales=tokens.scales[..., :5])
    _, state = leveled_attention(few, tokens.v.new_zeros(2, 2, 16, 3), torch.zeros(2, dtype=torch.int64))
    held = state.unflatten(2, (4, 4)).abs().amax((0, 1, 3, 4)) > 0
    assert held.nonzero().flatten().tolist() == [2, 3]


def test_empty_levels_are_not_computed(monkeypatch):
    """The work of a tile follows the levels that its tokens read and write, not their number."""
    widths, choose = [], levels_module._levels
    monkeypatch.setattr(levels_module, "_levels", lambda *call: widths.append(len(chosen := choose(*call))) or chosen)
    run(example(12))
    # Before the chunk; then after each tile those of the state, and of these those that the tile writes to: 64 is one
    # level, 128 another, to which the last 22 tokens, 16 + 4 + 2, add three.
    assert widths == [0, 1, 1, 1, 1, 4, 3]
