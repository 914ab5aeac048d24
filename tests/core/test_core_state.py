"""Generic functions over any state: rows, forks, measures, comparison, reservations, side costs."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinformer.core import state as states
from kinformer.runtime.errors import KinformerError


class Past(NamedTuple):
    k: Tensor
    seen: Tensor

    def reserve(self, length):
        buffer = torch.cat([self.k, self.k.new_zeros(*self.k.shape[:2], length, self.k.shape[3])], dim=2)
        return Reserved(buffer, self.seen.clone(), self.k.shape[2], [0])


Past.slots = ("k",)


class Reserved(states.ReservedState):
    def __init__(self, buffer, seen, length, ticket):
        super().__init__(ticket)
        self.buffer, self.seen, self.length = buffer, seen, length

    def append(self, k):
        ticket = self.consume()
        end = self.length + k.shape[2]
        self.buffer[:, :, self.length : end] = k
        return Reserved(self.buffer, self.seen + k.shape[2], end, ticket)

    def value(self):
        self.check()
        return Past(self.buffer[:, :, : self.length].clone(), self.seen.clone())

    def map(self, function):
        self.check()
        return Reserved(function(self.buffer.clone()), function(self.seen.clone()), self.length, [0])

    def tensors(self):
        yield from (self.buffer, self.seen)


class Cost(NamedTuple):
    total: Tensor
    aux: Tensor


Cost.aux_name = "ponder"


def past(seen, slots=None, seed=0):
    """A right-aligned past: row r holds its ``seen[r]`` newest slots, zeros before."""
    slots = max(seen) if slots is None else slots
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, count, 3, generator=generator, dtype=torch.float64) for count in seen]
    k = torch.stack([torch.cat([torch.zeros(2, slots - row.shape[1], 3, dtype=row.dtype), row], dim=1) for row in rows])
    return Past(k, torch.tensor(seen))


lengths = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(lengths, st.integers(0, 3))
def test_empty_slots_on_the_left_make_no_difference(seen, more):
    assert states.difference(past(seen), past(seen, max(seen) + more)) == 0.0


@given(lengths)
def test_rows_taken_apart_and_joined_are_the_state(seen):
    state = (past(seen), (torch.arange(len(seen)),))
    rows = [states.select_rows(state, torch.tensor([row])) for row in range(len(seen))]
    short = [(Past(own.k[:, :, own.k.shape[2] - count :], own.seen), rest) for (own, rest), count in zip(rows, seen)]
    joined = states.join_rows(short)
    assert states.difference(joined, state) == 0.0
    assert type(joined[0]) is Past


@given(lengths, st.data())
def test_select_and_repeat_rows(seen, data):
    state = past(seen)
    rows = data.draw(st.lists(st.integers(0, len(seen) - 1), min_size=1, max_size=5))
    chosen = states.select_rows(state, torch.tensor(rows))
    assert torch.equal(chosen.k, state.k[rows])
    twice = states.repeat_rows(state, 2)
    assert twice.seen.tolist() == [count for count in seen for _ in range(2)]


def test_difference_is_the_largest_anywhere():
    state = (past([2, 1]), Cost(torch.zeros(2), torch.zeros(2)))
    other = states.fork(state)
    other[1].aux[1] = -0.25
    assert states.difference(state, other) == 0.25
    other[0].seen[0] += 3
    assert states.difference(state, other) == 3.0


@pytest.mark.parametrize("place", [0, 1])
def test_nan_differs_from_everything(place):
    state, other = (torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.zeros(2))
    other[place][1] = torch.nan
    assert states.difference(state, other) == float("inf")
    assert states.difference(other, other) == float("inf")


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (torch.zeros(2), torch.zeros(3), r"shapes \(2,\) and \(3,\)"),
        ((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), "types tuple and tuple"),
        (past([1]), Cost(torch.zeros(1), torch.zeros(1)), "types Past and Cost"),
    ],
)
def test_unlike_states_cannot_be_compared(left, right, message):
    with pytest.raises(KinformerError, match=message):
        states.difference(left, right)


def test_bytes_count_every_leaf_and_the_capacity_of_reservations():
    state = (past([2, 2]), torch.zeros(2, dtype=torch.bfloat16))
    assert states.nbytes(state) == 2 * 2 * 2 * 3 * 8 + 2 * 8 + 2 * 2
    assert states.nbytes(states.reserve(state, 5)) == states.nbytes(state) + 2 * 2 * 5 * 3 * 8


def test_detach_fork_and_to():
    leaf = torch.ones(2, requires_grad=True)
    state = (leaf * 2, torch.tensor([1, 2]))
    assert not states.detach(state)[0].requires_grad
    assert states.fork(state)[0].requires_grad
    assert states.fork(state)[1].data_ptr() != state[1].data_ptr()
    moved = states.to(state, dtype=torch.bfloat16)
    assert [each.dtype for each in moved] == [torch.bfloat16, torch.int64]
    assert all(each.device.type == "meta" for each in states.tensors(states.to(state, device="meta")))


def test_reserve_keeps_constant_parts_and_can_be_repeated():
    constant = Cost(torch.zeros(2), torch.zeros(2))
    held = states.reserve((past([1, 2]), constant), 4)
    assert isinstance(held[0], Reserved)
    assert held[1] == constant
    assert states.reserve(held, 4)[0] is held[0]
    assert states.difference(states.value(held), (past([1, 2]), constant)) == 0.0


def test_a_reserved_state_has_one_owner():
    state, new = past([2, 2]), torch.ones(2, 2, 1, 3, dtype=torch.float64)
    first = states.reserve(state, 4)
    kept = states.value(first)
    fork = states.fork(first)
    second = first.append(new)
    for use in (lambda: first.append(new), lambda: states.fork(first), lambda: states.value(first)):
        with pytest.raises(KinformerError, match="already used .*generation 0; its buffers are at 1.*fork"):
            use()
    other = fork.append(2 * new)
    assert float(second.append(new).value().k[0, 0, -1, 0]) == 1.0
    assert float(other.value().k[0, 0, -1, 0]) == 2.0
    assert states.difference(kept, state) == 0.0


def test_rows_of_a_reservation_are_a_reservation_of_their_own():
    state = past([2, 1])
    held = states.reserve(state, 3)
    chosen = states.select_rows(held, torch.tensor([1]))
    held.append(torch.ones(2, 2, 1, 3, dtype=torch.float64))
    assert states.difference(chosen, states.select_rows(state, torch.tensor([1]))) == 0.0


def test_side_costs_are_summed_by_name_and_cleared():
    layer = Cost(torch.ones(2), torch.tensor([1.0, 2.0]))
    costs, cleared = states.pop_aux(((layer, past([1, 1])), layer))
    assert costs.keys() == {"ponder"}
    assert costs["ponder"].tolist() == [2.0, 4.0]
    assert cleared[1].aux.tolist() == [0.0, 0.0]
    assert cleared[1].total.tolist() == [1.0, 1.0]
    assert layer.aux.tolist() == [1.0, 2.0]
    assert states.pop_aux(cleared[0][1])[0] == {}
