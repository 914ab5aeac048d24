"""SPALM's gate: what it makes of neighbours, and where it is the language-model head alone."""

import pytest
import torch

from kinformer.heads.language import SpalmHead
from tests.heads.table import Table

DIM, VOCAB, TIME, NEAR = 6, 11, 5, 4

each_gate = pytest.mark.parametrize("elementwise", [False, True])


def drawn(seed=0):
    """Hidden states, a table and neighbours."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, TIME, DIM, generator=generator, dtype=torch.float64)
    table = torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64)
    return hidden, table, torch.randint(VOCAB, (2, TIME, NEAR), generator=generator)


def built(elementwise=False, bias=True):
    torch.manual_seed(0)
    head = SpalmHead.Config(elementwise=elementwise, bias=bias).build(DIM, Table(vocab_size=VOCAB)).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


@each_gate
def test_it_is_the_formula_of_the_paper(elementwise):
    head, (hidden, table, near) = built(elementwise), drawn()
    got = head(hidden, Table(table), neighbours=near)
    for row in range(2):
        for time in range(TIME):
            h, following = hidden[row, time], table[near[row, time]]
            memory = sum(share * y for share, y in zip((following @ h).softmax(0), following, strict=True))
            gate = (head.gate.weight @ h).sigmoid()
            assert gate.shape == ((DIM,) if elementwise else (1,))
            wanted = table @ ((1 - gate) * memory + gate * h) + head.inner.bias
            assert (got[row, time] - wanted).abs().max() < 1e-12


def test_the_memory_of_one_neighbour_is_its_embedding():
    head, (hidden, table, near) = built(), drawn()
    with torch.no_grad():
        head.gate.weight.zero_()
    fused = head.fuse(hidden, table, near[..., :1])
    assert (fused - (table[near[..., 0]] + hidden) / 2).abs().max() < 1e-12


@each_gate
def test_the_order_of_neighbours_and_missing_ones_change_nothing(elementwise):
    head, (hidden, table, near) = built(elementwise), drawn()
    got = head(hidden, Table(table), neighbours=near)
    assert (head(hidden, Table(table), neighbours=near.flip(-1)) - got).abs().max() < 1e-12
    assert (head(hidden, Table(table), neighbours=near[..., torch.tensor([2, 0, 3, 1])]) - got).abs().max() < 1e-12
    gaps = torch.full_like(near, -1)
    assert (head(hidden, Table(table), neighbours=torch.cat([gaps, near, gaps], -1)) - got).abs().max() < 1e-12
    assert (head(hidden, Table(table), neighbours=torch.cat([near, near[..., :1]], -1)) - got).abs().max() > 1e-3


def test_without_a_neighbour_it_is_the_language_model_head_exactly():
    head, (hidden, table, near) = built(), drawn()
    alone = head.inner(hidden, Table(table))
    assert torch.equal(head(hidden, Table(table)), alone)
    assert torch.equal(head.eval()(hidden, Table(table)), alone)
    for none in (near[..., :0], torch.full_like(near, -1)):
        assert torch.equal(head(hidden, Table(table), neighbours=none), alone)
    near[0] = -1
    got = head(hidden, Table(table), neighbours=near)
    assert torch.equal(got[0], alone[0]) and (got[1] - alone[1]).abs().max() > 1e-2


@each_gate
def test_gradients_reach_what_the_neighbours_say(elementwise):
    head, (hidden, table, near) = built(elementwise), drawn()
    near[0, 1], near[1, 2, 1:] = -1, -1
    leaves = [hidden.requires_grad_(), table.requires_grad_(), head.gate.weight, head.inner.bias]
    torch.autograd.gradcheck(lambda hidden, table, *_: head(hidden, Table(table), neighbours=near), leaves)
    (grad,) = torch.autograd.grad(head.fuse(hidden.detach(), table, near).sum(), table)
    said = set(near[near >= 0].tolist())
    assert {row for row in range(VOCAB) if grad[row].abs().max() > 0} == said


def test_every_weight_has_a_gradient_without_a_store():
    head, (hidden, table, _) = built(), drawn()
    head(hidden, Table(table)).sum().backward()
    assert torch.equal(head.gate.weight.grad, torch.zeros(1, DIM, dtype=torch.float64))
