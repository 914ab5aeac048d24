"""The loss by position in the window: bins that double, sums that are those of the whole."""

from math import log

import pytest
import torch

from kinformer.lab.evaluation.bits import ByPosition, Windows, measure

from .conftest import tiny


def test_bins_double_and_hold_what_was_counted():
    nats = torch.arange(1, 12, dtype=torch.float64).repeat(2, 1)
    counted = torch.ones(2, 11, dtype=torch.bool)
    counted[1, :3] = False
    places = ByPosition()
    places.add(nats, counted)
    places.add(torch.full((1, 2), 100.0, dtype=torch.float64), torch.tensor([[False, True]]))
    told = places.bins(tokens_per_byte=0.5)
    assert [(each.first, each.last, each.tokens) for each in told] == [
        (1, 1, 1), (2, 2, 2), (3, 4, 3), (5, 8, 8), (9, 16, 6)
    ]  # fmt: skip
    sums = [1, 2 + 100, 3 + 4 + 4, 2 * (5 + 6 + 7 + 8), 2 * (9 + 10 + 11)]
    for each, total in zip(told, sums, strict=True):
        assert each.bits_per_byte == pytest.approx(total / each.tokens / log(2) * 0.5)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_positions_of_a_measurement_add_up_to_it(corpus, overlap):
    model, split = tiny("gpt"), corpus.splits["test"].take(300)
    told = measure(model, split, Windows(context=24, overlap=overlap), chunk=100)
    assert sum(each.tokens for each in told.by_position) == told.tokens == 299
    bits = sum(each.bits_per_byte * each.tokens for each in told.by_position)
    assert bits * log(2) * split.bytes / told.tokens == pytest.approx(told.nats, rel=1e-10)
    assert told.by_position[0].first == 1 and told.by_position[-1].last == 32
    again = measure(model, split, Windows(context=24, overlap=overlap), chunk=1000)
    assert [each.tokens for each in again.by_position] == [each.tokens for each in told.by_position]


def test_a_position_sees_exactly_what_is_before_it(corpus):
    """The bin of one token of context, token by token."""
    model, split = tiny("linear-transformer"), corpus.splits["test"].take(41)
    told = measure(model, split, Windows(context=8)).by_position[0]
    tokens = torch.from_numpy(split.tokens(0, 41).astype("int64"))
    with torch.no_grad():
        nats = [
            -model(tokens[None, start : start + 1])[0][0, 0].log_softmax(-1)[tokens[start + 1]]
            for start in range(0, 40, 8)
        ]
    assert told.tokens == 5
    assert told.bits_per_byte * 41 / 40 == pytest.approx(float(sum(nats)) / 5 / log(2), rel=1e-9)


def test_a_carried_state_has_no_positions(corpus):
    assert measure(tiny("linear-transformer"), corpus.splits["test"].take(50)).by_position == ()
