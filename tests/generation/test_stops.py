"""Stop strings in text that comes in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinformer.generation.sampling import StopText
from kinformer.runtime.errors import KinformerError


@given(
    text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_text_is_passed_on_up_to_the_first_stop(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop = StopText(stops)
    shown, fed = "", ""
    for piece in pieces:
        fed += piece
        shown += stop.feed(piece)
        if not stop.stopped:
            waiting = fed[len(shown) :]
            assert fed.startswith(shown)
            assert not waiting or any(each.startswith(waiting) and each != waiting for each in stops)
        if stop.stopped:
            break
    shown += stop.finish()
    ends = [fed.find(each) for each in stops if each in fed]
    assert stop.stopped == bool(ends)
    assert shown == (fed[: min(ends)] if ends else fed)
    assert stop.feed("more") == ("" if stop.stopped else StopText(stops).feed("more"))


def test_nothing_waits_without_stops():
    assert StopText([]).feed("abc") == "abc"


def test_an_empty_stop_is_told():
    with pytest.raises(KinformerError, match="a stop string is empty"):
        StopText(["a", ""])
