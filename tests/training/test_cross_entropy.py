"""The cross-entropy in pieces is PyTorch's, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from kinformer.family.build import configure
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.training import cross_entropy as pieces
from kinformer.runtime.errors import KinformerError

ROWS, DIM, VOCAB = 23, 6, 11


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Pieces of five rows, from the smallest logits on."""
    monkeypatch.setattr(pieces, "LOGITS", 1)
    monkeypatch.setattr(pieces, "PIECE", 5 * VOCAB)
    monkeypatch.setattr(pieces, "LEAST", 1)


def made(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(ROWS, DIM), scale * torch.randn(VOCAB, DIM), torch.randn(VOCAB)
    targets = torch.randint(VOCAB, (ROWS,))
    return *(each.to(dtype).requires_grad_() for each in (x, weight, bias)), targets


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["usual", "probabilities of 0"])
@pytest.mark.parametrize("biased", [True, False])
def test_value_and_gradients(biased, scale) -> None:
    x, weight, bias, targets = made(scale=scale)
    learnt = [x, weight, *([bias] if biased else [])]
    own = pieces.summed(x, weight, bias if biased else None, targets)
    wanted = cross_entropy(linear(x, weight, bias if biased else None), targets, reduction="sum")
    torch.testing.assert_close(own, wanted)
    found, expected = (torch.autograd.grad(each / 7, learnt) for each in (own, wanted))
    torch.testing.assert_close(found, expected)


def test_without_gradients_it_makes_none() -> None:
    x, weight, bias, targets = made()
    with torch.no_grad():
        own = pieces.summed(x, weight, bias, targets)
    assert not own.requires_grad
    torch.testing.assert_close(own, cross_entropy(linear(x, weight, bias), targets, reduction="sum").detach())


def test_autocast_makes_the_products_narrow_and_the_sums_wide() -> None:
    x, weight, _, targets = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        own, logits = pieces.summed(x, weight, None, targets), linear(x, weight)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, cross_entropy(logits.float(), targets, reduction="sum"))
    exact = cross_entropy(linear(x, weight), targets, reduction="sum")
    found, expected = (torch.autograd.grad(each, [x, weight]) for each in (own, exact))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


def test_other_derivatives_raise() -> None:
    x, weight, bias, targets = made()
    gradient = torch.autograd.grad(pieces.summed(x, weight, bias, targets), x, create_graph=True)[0]
    with pytest.raises(KinformerError, match="not have a second derivative.*cross_entropy of the model's logits"):
        gradient.sum().backward()
    with pytest.raises(KinformerError, match="not have a forward-mode derivative"):
        torch.func.jvp(lambda x: pieces.summed(x, weight, bias, targets), (x.detach(),), (torch.ones_like(x),))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_objective_is_the_same_either_way(tied, marked, monkeypatch) -> None:
    torch.manual_seed(0)
    model: nn.Module = configure("gpt", "tiny", set={"head.tied": tied}).build()
    tokens = torch.randint(256, (3, 20))
    valid = torch.arange(19) < torch.tensor([19, 7, 1])[:, None] if marked else None
    batch, found = TokenBatch(tokens, None, valid), []
    for least in (1, 1 << 40):
        monkeypatch.setattr(pieces, "LOGITS", least)
        assert pieces.in_pieces(model, 57) == (least == 1)
        loss, told, _ = NextTokenLoss()(model, batch, None, 0.0)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.detach(), told["nats"], told["predicted"], gradients))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_head_that_is_more_than_a_product_is_asked_for_logits() -> None:
    assert not pieces.in_pieces(configure("spalm", "tiny").build(), 10)


def test_compiled_models_are_called_whole() -> None:
    model: nn.Module = configure("gpt", "tiny").build()
    assert pieces.in_pieces(model, 10)
    model.compile()
    assert not pieces.in_pieces(model, 10)
