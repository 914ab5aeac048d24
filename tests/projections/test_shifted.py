"""The causal convolution's own gradients, beside those that autograd makes of its definition."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from kinformer.parts import projections as shifted
from kinformer.parts.projections import shifted_sum


def inputs(width, dtype=torch.float64, rows=2, heads=3, time=11, channels=2):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(rows, heads, time + width - 1, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(width, heads, channels, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (tokens, weight)]


def differentiated(tokens, weight, inside):
    y = shifted_sum(tokens, weight, inside)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (tokens, weight), gradient)


@pytest.mark.parametrize("piece", [12, 1 << 17])
@pytest.mark.parametrize(("width", "shared"), [(1, False), (2, True), (4, False)])
def test_values_and_gradients_are_those_of_the_definition(width, shared, piece, monkeypatch):
    """The definition is what is computed where a token may be of another sequence; here all are of the same."""
    monkeypatch.setattr(shifted, "PIECE", piece)
    tokens, weight = inputs(width)
    if shared:
        tokens = tokens.detach()[:, :1].requires_grad_()
    ours = differentiated(tokens, weight, None)
    wanted = differentiated(tokens, weight, lambda back: torch.ones(2, 11, dtype=torch.bool))
    assert torch.equal(ours[0], wanted[0])
    for gradient, expected in zip(ours[1:], wanted[1:], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-13)


def test_derivatives_of_any_order_and_in_both_modes():
    tokens, weight = inputs(3, time=5)
    assert gradcheck(lambda x, w: shifted_sum(x, w, None), (tokens, weight), check_forward_ad=True)
    assert gradgradcheck(lambda x, w: shifted_sum(x, w, None), (tokens, weight))
    only = shifted_sum(tokens.detach(), weight, None).sum()
    assert torch.autograd.grad(only, weight)[0].shape == weight.shape


def test_rows_may_be_mapped():
    tokens, weight = inputs(3)
    rows = torch.func.vmap(lambda x, w: shifted_sum(x[None], w, None)[0], (0, None))(tokens, weight)
    torch.testing.assert_close(rows, shifted_sum(tokens, weight, None), rtol=0, atol=0)


def test_gradients_of_narrow_weights_are_summed_in_float32():
    """8,192 tokens: a sum in bfloat16 would be off by far more than its last digit."""
    narrow = inputs(2, torch.bfloat16, time=8192)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    ours, wanted = differentiated(*narrow, None), differentiated(*wide, None)
    torch.testing.assert_close(ours[2].double(), wanted[2], rtol=0.02, atol=0.02 * float(wanted[2].abs().max()))
