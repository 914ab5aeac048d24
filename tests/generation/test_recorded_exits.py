"""A step recorded from exit to exit: tokens leave by the model's own exits, and the same ones are drawn."""

import pytest
import torch

from kinformer.core.state import difference
from kinformer.generation.recording import RecordedExits
from kinformer.generation.session import Session
from tests.stacks.test_exits import CHANGES, build, exits_of


def session(model, recorded=True):
    made = Session(model, 1, temperature=1.0, seed=0, room=12, recorded=recorded)
    made._stepping.record_at = 2
    made.feed(torch.randint(23, (1, 9), generator=torch.Generator().manual_seed(0)))
    return made


@pytest.mark.parametrize("name", CHANGES)
def test_the_models_own_tokens_exits_and_state(name):
    model = build(**CHANGES[name])
    ours, expected = session(model), session(model, recorded=False)

    def steps(made):
        for step in range(30):  # beyond the reserved room
            if step == 14:
                made._stepping.record_at = 0
            yield made.step()

    got, left = exits_of(model, lambda: torch.cat(list(steps(ours))))
    want, own = exits_of(model, lambda: torch.cat(list(steps(expected))))
    assert torch.equal(got, want) and torch.equal(left, own)
    assert isinstance(ours._stepping.running, RecordedExits)
    with torch.inference_mode():
        state = ours._stepping.settled(ours._state)
    assert difference(state, expected._state) < 1e-9


def test_a_fork_goes_on_by_the_same_recording():
    model = build("softmax")
    ours, expected = session(model), session(model, recorded=False)
    for made in (ours, expected):
        for _ in range(5):
            made.step()
    recording = ours._stepping.running
    twins = ours.fork(1), expected.fork(1)
    for _ in range(5):
        assert torch.equal(ours.step(), expected.step())
        assert torch.equal(twins[0].step(), twins[1].step())
    assert isinstance(recording, RecordedExits) and isinstance(ours._stepping.running, RecordedExits)
    assert ours._stepping.running._pieces[0].recording is recording._pieces[0].recording


def test_several_rows_leave_by_unlike_exits():
    model = build("softmax")
    made = Session(model, 2, temperature=0, room=12)
    made._stepping.record_at = 2
    made.feed(torch.zeros(2, 5, dtype=torch.int64))
    for _ in range(5):
        made.step()
    assert made._stepping.running is None
