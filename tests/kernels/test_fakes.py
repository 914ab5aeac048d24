"""What compilers are told of the operators' results is what these are, whatever the layout of their inputs."""

import pytest
import torch

from kinformer.core import pattern
from kinformer.core.parts import Relative
from kinformer.kernels.block_sparse import _backward, _call, _forward, attend
from kinformer.kernels.softmax import Scoring, Visibility
from kinformer.parts.patterns.sequence import Strided


@pytest.mark.parametrize("table", ["bias", "factor"])
def test_gradients_of_tables_by_distance_are_laid_out_as_declared(table):
    """A table of a layer's embedding comes transposed, [heads, distances] of [distances, heads]."""
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    scoring = Scoring(0.5, relative=Relative(0, **{table: torch.randn(9, 2).T}))
    call = _call(q, k, v, Visibility(Strided(stride=3).build()), scoring)
    out, lse = _forward(*call)
    given = (out, lse, out, lse, *call, table == "bias", table == "factor")
    torch.library.opcheck(_backward, given, test_utils="test_faketensor")


def test_patterns_are_numbered_and_the_longest_unused_is_let_go(monkeypatch):
    """Every length and composition brings a new one; without a bound a long-lived process would keep them all."""
    monkeypatch.setattr(pattern, "_MOST", len(pattern._NUMBERED) + 3)
    kept, *others = (Strided(stride=stride).build() for stride in range(1000, 1010))
    number = kept.number()
    for other in others:
        other.number()
        assert kept.number() == number and pattern.numbered(number) is kept
    assert len(pattern._NUMBERED) == len(pattern._NUMBERS) <= pattern._MOST
    q, k, v = torch.randn(3, 1, 2, 9, 4, requires_grad=True).unbind()
    for visible in (others[0], kept):
        attend(q, k, v, Visibility(visible), Scoring(0.5)).out.sum().backward(retain_graph=True)
