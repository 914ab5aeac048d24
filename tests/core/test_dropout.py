"""Dropout by shared random words: shares, expectations, gradients, determinism, and when PyTorch's own is asked."""

import pytest
import torch
from torch import nn

from kinformer.runtime.draws import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_share_scale_and_gradient(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(301, 333, dtype=dtype, requires_grad=True)
    y = Dropout(p)(x)
    y.backward(torch.ones_like(y))
    kept = y != 0
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.01
    assert y.dtype == dtype
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)), rtol=1e-2, atol=0)
    torch.testing.assert_close(x.grad, y.detach())


def test_elements_are_independent():
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(4096, 64)) != 0).double() - 0.5
    correlations = kept.T @ kept / (0.25 * len(kept))
    assert float((correlations - torch.eye(64)).abs().max()) < 0.1  # 6 standard deviations of 2,016 pairs


def test_masks_follow_the_global_generator():
    drop, x = Dropout(0.3), torch.randn(3, 5, 7)
    torch.manual_seed(1)
    first, second = drop(x), drop(x)
    torch.manual_seed(1)
    torch.testing.assert_close(drop(x), first, rtol=0, atol=0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends_are_pytorchs(p):
    x = torch.randn(4, 5)
    torch.testing.assert_close(Dropout(p)(x), nn.Dropout(p)(x))


def test_nothing_is_dropped_in_eval_mode():
    x = torch.randn(4, 5)
    assert torch.equal(Dropout(0.5).eval()(x), x)


def test_captured_graphs_draw_the_same():
    model = nn.Sequential(nn.Linear(4, 4), Dropout(0.5))
    captured = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(captured(x), expected)
