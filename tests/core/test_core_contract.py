"""Positions, counters and alignment of ragged chunks with resets, against a token-by-token account."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    advance,
    left_align,
    positions_of,
    real_resets,
    right_align,
    select_valid,
)


@st.composite
def masks(draw, prefix=True):
    """seen [batch], valid [batch, time] and reset [batch, time]."""
    batch, time = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    flags = st.lists(st.lists(st.booleans(), min_size=time, max_size=time), min_size=batch, max_size=batch)
    seen = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch)))
    counts = torch.tensor(draw(st.lists(st.integers(0, time), min_size=batch, max_size=batch)))
    valid = torch.arange(time) < counts[:, None] if prefix else torch.tensor(draw(flags))
    return seen, valid, torch.tensor(draw(flags))


def account(seen, valid, reset):
    """Positions of valid tokens and the counter of one row, one token after the other."""
    positions = []
    for here, anew in zip(valid, reset, strict=True):
        if here:
            seen = 0 if anew else seen
            positions.append(seen)
            seen += 1
    return positions, seen


@given(masks())
def test_positions_and_counters_follow_the_account(case):
    seen, valid, reset = case
    chunk = Chunk(torch.zeros(*valid.shape, 2), valid, reset)
    positions = positions_of(chunk, seen)
    after = advance(seen, chunk, positions)
    for row in range(len(seen)):
        want, counter = account(int(seen[row]), valid[row].tolist(), reset[row].tolist())
        assert positions[row, valid[row]].tolist() == want
        assert int(after[row]) == counter


@given(masks())
def test_without_padding_masks_may_be_left_out(case):
    seen, valid, reset = case
    everywhere = torch.ones_like(valid)
    x = torch.zeros(*valid.shape, 2)
    for short, full in (
        (Chunk(x, None, reset), Chunk(x, everywhere, reset)),
        (Chunk(x), Chunk(x, everywhere, torch.zeros_like(reset))),
    ):
        positions = positions_of(short, seen)
        assert torch.equal(positions, positions_of(full, seen))
        assert torch.equal(advance(seen, short, positions), advance(seen, full, positions))


@given(masks(prefix=False))
def test_left_alignment_is_stable_and_is_put_back(case):
    _, valid, _ = case
    tokens = torch.arange(valid.numel()).view(valid.shape)
    aligned = left_align(valid)
    moved = tokens.gather(1, aligned.order)
    assert torch.equal(moved.gather(1, aligned.inverse), tokens)
    assert torch.equal(aligned.valid, torch.arange(valid.shape[1]) < valid.sum(dim=1, keepdim=True))
    for row in range(len(valid)):
        assert moved[row, aligned.valid[row]].tolist() == tokens[row, valid[row]].tolist()


@given(masks(), st.integers(0, 4))
def test_right_alignment_ends_each_row_with_its_last_valid_slot(case, past):
    _, valid, _ = case
    batch, time = valid.shape
    counts = valid.sum(dim=1)
    slots = torch.arange(batch * (past + time)).view(batch, 1, past + time, 1).expand(-1, 2, -1, 3)
    moved = right_align(slots, counts, time)
    assert moved.shape == slots.shape
    for row, count in enumerate(counts.tolist()):
        kept = slots[row, :, : past + count]
        assert torch.equal(moved[row, :, time - count :], kept)


def test_select_valid_stops_nan_in_values_and_gradients():
    valid = torch.tensor([[True, False], [True, True]])
    x = torch.tensor([[[1.0], [float("nan")]], [[2.0], [3.0]]], requires_grad=True)
    selected = select_valid(x, valid)
    assert selected.flatten().tolist() == [1.0, 0.0, 2.0, 3.0]
    (selected**2).sum().backward()
    assert x.grad.flatten().tolist() == [2.0, 0.0, 4.0, 6.0]
    assert select_valid(x, None) is x


def test_resets_on_padding_are_none():
    valid, reset = torch.tensor([[True, False]]), torch.tensor([[True, True]])
    x = torch.zeros(1, 2, 1)
    assert real_resets(Chunk(x, valid, reset)).tolist() == [[True, False]]
    assert real_resets(Chunk(x, None, reset)) is reset
    assert real_resets(Chunk(x, valid)) is None


def test_a_bare_mixer_promises_nothing():
    mixer = CausalMixer()
    assert mixer.retained is None
    calls = (
        lambda: mixer.initial_state(1),
        lambda: mixer(Chunk(torch.zeros(1, 1, 1)), ()),
        lambda: mixer.state_bytes(1),
    )
    for call in calls:
        with pytest.raises(NotImplementedError):
            call()
