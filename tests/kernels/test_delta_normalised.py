"""The delta rule with attention normalisation: its definition token by token, cut anywhere, with resets."""

import pytest
import torch

from kinformer.kernels.delta import delta_rule, normalised_delta_rule
from kinformer.kernels.linear import LinearState

EPS = 1e-5


def tokens(time=11, seed=0):
    """q, k, v, beta of two rows and three heads, features positive."""
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.rand(2, 2, 3, time, 5, generator=draw, dtype=torch.float64)
    v = torch.randn(2, 3, time, 4, generator=draw, dtype=torch.float64)
    return q, k, v, torch.rand(2, 3, time, generator=draw, dtype=torch.float64)


def nothing():
    return LinearState(torch.zeros(2, 3, 5, 4, dtype=torch.float64), torch.zeros(2, 3, 5, dtype=torch.float64))


def by_definition(q, k, v, beta, reset):
    """One token after the other, as the docstring of the kernel has it."""
    w, z = nothing()
    outputs = []
    for t in range(q.shape[2]):
        begins = reset[:, t] | (t == 0)
        w, z = w.masked_fill(begins[:, None, None, None], 0), z.masked_fill(begins[:, None, None], 0)
        c = (z * k[:, :, t]).sum(-1).masked_fill(begins[:, None], 1)
        read = torch.einsum("bhfd,bhf->bhd", w, k[:, :, t]) / (c + EPS)[..., None]
        written = (beta[:, :, t] * c / (c + EPS))[..., None] * (v[:, :, t] - read)
        w = w + k[:, :, t, :, None] * written[:, :, None]
        z = z + k[:, :, t]
        outputs.append(torch.einsum("bhfd,bhf->bhd", w, q[:, :, t]) / ((z * q[:, :, t]).sum(-1, keepdim=True) + EPS))
    return torch.stack(outputs, 2), w, z


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_it_is_its_definition_wherever_it_is_cut(impl):
    given = tokens()
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[0, 4] = reset[1, 7] = reset[1, 8] = True
    want, w, z = by_definition(*given, reset)
    for cut in (11, 4, 1):
        state, outputs = nothing(), []
        for start in range(0, 11, cut):
            part = tuple(item[:, :, start : start + cut] for item in given)
            begins = reset[:, start : start + cut].clone()
            first = begins.clone()
            first[:, 0] |= start == 0
            y, state = normalised_delta_rule(part, state, first, eps=EPS, reset=begins, impl=impl)
            outputs.append(y)
        assert (torch.cat(outputs, 2) - want).abs().max() < 1e-11
        assert (state.s - w).abs().max() < 1e-11 and (state.z - z).abs().max() < 1e-11


def test_at_equal_keys_it_corrects_a_mean():
    """Where all keys are alike, what is read moves by beta (v - what was read) over the number of tokens."""
    _, k, v, beta = tokens(6)
    k = torch.ones_like(k) / 5
    first = torch.arange(6).expand(2, -1) == 0
    y, _ = normalised_delta_rule((k, k, v, beta), nothing(), first, eps=0.0)
    want = [beta[:, :, 0, None] * v[:, :, 0]]
    for t in range(1, 6):
        strength = beta[:, :, t, None]
        want.append(((t - strength) * want[-1] + strength * v[:, :, t]) / (t + 1))
    assert (y - torch.stack(want, 2)).abs().max() < 1e-12
    plain, _ = delta_rule(k, k, v, beta, nothing().s)
    assert (plain - y).abs().max() > 0.1
