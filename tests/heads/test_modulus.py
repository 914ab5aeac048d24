"""The head of complex models."""

import pytest
import torch

from kinformer.family.build import configure
from kinformer.heads.classes import ClassificationHead, PolicyAndValue
from kinformer.heads.language import LanguageModelHead, ModulusHead
from kinformer.runtime.errors import KinformerError
from tests.heads.table import Table


@pytest.mark.parametrize("tied", [True, False])
def test_reads_the_size_of_complex_numbers(tied):
    torch.manual_seed(0)
    head = ModulusHead.Config(inner=LanguageModelHead.Config(tied=tied)).build(8, Table(vocab_size=5)).double()
    hidden, embedding = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    output = embedding if tied else head.inner.output.weight
    want = torch.complex(*hidden.chunk(2, -1)).abs() / 1.5 @ output.mT
    assert (head(hidden, Table(embedding)) - want).abs().max() < 1e-9
    turned = torch.cat([-hidden[..., 4:], hidden[..., :4]], -1)
    assert (head(turned, Table(embedding)) - want).abs().max() < 1e-9


def test_gradient_at_zero_is_finite():
    head = ModulusHead.Config().build(8, Table(vocab_size=5))
    hidden = torch.zeros(1, 1, 8, requires_grad=True)
    head(hidden, Table(torch.randn(5, 4))).sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_odd_widths_are_refused():
    with pytest.raises(KinformerError, match="dim is 7; use an even one"):
        ModulusHead.Config().build(7, Table(vocab_size=5))


def test_what_stands_around_a_head_of_whole_sequences_is_one():
    head = ModulusHead.Config(inner=ModulusHead.Config(inner=ClassificationHead.Config(classes=3)))
    assert not head.per_position and ModulusHead.Config().per_position
    with pytest.raises(KinformerError, match="'modulus' reads a whole sequence at once, which a decoder must not"):
        configure("gpt", "tiny", set={"head": head})
    with pytest.raises(KinformerError, match="'modulus', which reads a whole sequence at once"):
        PolicyAndValue.Config(policy=head)
