"""Sessions that go back: as if what is taken back had never been there, whatever the mechanism."""

import pytest
import torch

from kinformer.core.state import difference, value
from kinformer.generation.session import Session
from kinformer.runtime.errors import KinformerError

from ..members import CAUSAL
from .conftest import tiny

NEAR = 1e-9


def tokens(rows, time, seed):
    return torch.randint(0, 17, (rows, time), generator=torch.Generator().manual_seed(seed))


def agree(session, other):
    """Both sessions absorbed all of their text, and have one state and one prediction."""
    assert session._lengths == other._lengths and not session._pending and not other._pending
    mine, others = (value(each._stepping.settled(each._state)) for each in (session, other))
    assert difference(mine, others) <= NEAR
    assert (session._logits - other._logits).abs().max() <= NEAR


@pytest.mark.parametrize("name", CAUSAL)
def test_what_is_taken_back_was_never_there(name):
    model = tiny(name)
    prompt, others = tokens(2, 12, 1), tokens(2, 3, 2)
    valid = torch.arange(12) < torch.tensor([[12], [4]])
    session = Session(model, 2, temperature=0, rewind=6, room=8)
    session.feed(prompt, valid)
    for _ in range(3):
        session.step()
    session.feed(tokens(2, 1, 3))
    session.rewind([6, 5])
    session.feed(others)
    never = Session(model, 2, temperature=0, room=8)
    kept = torch.arange(12) < torch.tensor([[10], [3]])
    never.feed(torch.cat([prompt, others], 1), torch.cat([kept, torch.ones(2, 3, dtype=torch.bool)], 1))
    agree(session, never)


WINDOW = {"layers.*.mixer.pattern": {"kind": "local", "window": 5}}
RECORDED = [("gpt", {}), ("gpt", WINDOW), ("linear-transformer", {}), ("gated-deltanet", {}), ("transformer-xl", {})]


@pytest.mark.parametrize(("name", "changes"), RECORDED)
def test_recorded_steps_are_taken_back(name, changes):
    model = tiny(name, **changes)
    prompt, times = tokens(1, 5, 1), 0
    session = Session(model, temperature=0, rewind=4, room=60)
    session.feed(prompt)
    text = prompt[0].tolist()
    for number in range(90):
        text += session.step().tolist()
        if number % 7 == 6:
            session.rewind(number % 5)
            text = text[: len(text) - number % 5]
        times += session._stepping.running is not None
    assert times > 40 or name == "transformer-xl"
    session.rewind(3)
    text = text[:-3]
    others = tokens(1, 2, 2)
    session.feed(others)
    never = Session(model, temperature=0)
    never.feed(torch.tensor([text + others[0].tolist()]))
    agree(session, never)
    expected = [int(never.step()) for _ in range(12)]
    assert [int(session.step()) for _ in range(12)] == expected


@pytest.mark.parametrize("bound", [1, 5, 40])
def test_any_walk_back_and_forth_is_its_text(model, bound):
    generator = torch.Generator().manual_seed(bound)
    session, text = Session(model, temperature=0, rewind=bound, room=4), []
    for number in range(40):
        count = int(torch.randint(1, 9, (), generator=generator))
        if number % 3 == 0 or not text:
            fresh = tokens(1, count, number)
            session.feed(fresh)
            text += fresh[0].tolist()
        elif number % 3 == 1:
            text += [int(session.step()) for _ in range(count)]
        else:
            assert session.rewindable == min(bound, len(text)) or session.rewindable == bound
            back = min(count, session.rewindable)
            session.rewind(back)
            text = text[: len(text) - back]
            assert session.length == len(text)
        if len(text) > 100:
            break
    session.feed(tokens(1, 1, 99))
    never = Session(model, temperature=0)
    never.feed(torch.tensor([[*text, int(tokens(1, 1, 99))]]))
    agree(session, never)


def test_all_of_a_text_can_be_taken_back(linear):
    session = Session(linear, temperature=0, rewind=8)
    session.feed(tokens(1, 3, 1))
    session.step()
    session.rewind(4)
    assert session.length == 0
    with pytest.raises(KinformerError, match="row 0 of this session is empty"):
        session.step()
    session.feed(tokens(1, 5, 2))
    never = Session(linear, temperature=0)
    never.feed(tokens(1, 5, 2))
    agree(session, never)


def test_a_row_that_was_taken_back_whole_draws_nothing(linear):
    session, never = Session(linear, 2, temperature=0, rewind=8), Session(linear, 2, temperature=0)
    text = tokens(2, 3, 1)
    session.feed(text)
    session.rewind([1, 3])
    with pytest.raises(KinformerError, match="row 1 of this session is empty"):
        session.step()
    session.feed(text, torch.tensor([[False, False, True], [True, True, True]]))
    never.feed(text)
    assert torch.equal(session.step(), never.step())


def test_a_fork_goes_back_alone(model):
    session = Session(model, temperature=0, rewind=4)
    session.feed(tokens(1, 9, 1))
    first = [int(session.step()) for _ in range(3)]
    copies = session.fork(2)
    copies.rewind([2, 4])
    assert [int(session.step()) for _ in range(2)] == [int(token) for token in _after(model, first, 2)]
    copies.feed(tokens(1, 1, 5).expand(2, 1))
    session.rewind(4)
    session.feed(tokens(1, 1, 5))
    never = Session(model, temperature=0)
    never.feed(torch.cat([tokens(1, 9, 1), torch.tensor([first[:1]]), tokens(1, 1, 5)], 1))
    agree(session, never)
    assert (copies._logits[0] - never._logits[0]).abs().max() <= NEAR
    assert copies._lengths == [11, 9]


def _after(model, first, count):
    session = Session(model, temperature=0)
    session.feed(torch.cat([tokens(1, 9, 1), torch.tensor([first])], 1))
    return [session.step() for _ in range(count)]


def test_penalties_and_stops_forget_what_is_taken_back(linear):
    options = {"temperature": 0.0, "repetition_penalty": 3.0, "stop": [[16, 16]]}
    session = Session(linear, rewind=6, **options)
    session.feed(tokens(1, 4, 1))
    free = [int(session.step()) for _ in range(5)]
    session.rewind(5)
    assert [int(session.step()) for _ in range(5)] == free
    stop = free[2:4]
    session = Session(linear, rewind=6, **(options | {"stop": [stop]}))
    session.feed(tokens(1, 4, 1))
    assert [token for (token,) in session.stream()] == free[:4] and session.finished
    session.rewind(2)
    assert not session.finished
    assert [token for (token,) in session.stream()] == free[2:4] and session.finished


def test_a_step_that_was_taken_back_is_drawn_anew(linear):
    session = Session(linear, 4, seed=1, rewind=1)
    session.feed(tokens(1, 4, 1).expand(4, -1))
    draws = []
    for _ in range(4):
        draws.append(tuple(session.step().tolist()))
        session.rewind()
    assert len(set(draws)) == 4


def test_what_cannot_be_taken_back_is_told(linear):
    session = Session(linear, rewind=3)
    assert session.rewindable == 0
    session.feed(tokens(1, 9, 1))
    assert session.rewindable == 3
    with pytest.raises(KinformerError, match=r"4 tokens are to be taken back, but .* can go back by \[3\]"):
        session.rewind(4)
    with pytest.raises(KinformerError, match="-1 tokens"):
        session.rewind(-1)
    with pytest.raises(KinformerError, match=r"\[1, 1\] tokens"):
        session.rewind([1, 1])
    with pytest.raises(KinformerError, match=r"can go back by \[0\]"):
        Session(linear).rewind()
    with pytest.raises(KinformerError, match="rewind is -1 but must be 0 or more"):
        Session(linear, rewind=-1)
