"""The protocol of measuring: each token once, in order, and all of them charged."""

from math import log, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinformer.lab.data import EvaluationStream
from kinformer.runtime.errors import KinformerError


@given(size=st.integers(2, 256), length=st.integers(1, 300), streams=st.integers(1, 12), cut=st.integers(1, 255))
def test_each_token_but_the_first_is_predicted_once_from_the_one_before(make_split, size, length, streams, cut):
    data = np.arange(size, dtype=np.uint8).tobytes()
    cut = min(cut, size - 1)
    split = make_split(data[:cut], data[cut:])
    if size < streams + 1:
        with pytest.raises(KinformerError, match=f"holds {size} tokens but measuring in {streams} streams"):
            EvaluationStream(split, length, streams)
        return
    stream = EvaluationStream(split, length, streams, reset_documents=True)
    targets, rows = [], [[] for _ in stream.starts]
    for segment in stream:
        inputs, following = segment.tokens[:, :-1], segment.tokens[:, 1:]
        assert inputs.shape == segment.valid.shape == segment.reset.shape
        assert inputs.shape[1] <= length
        assert (following[segment.valid] == inputs[segment.valid] + 1).all()
        assert np.array_equal(segment.reset, segment.valid & np.isin(inputs, [0, cut]))
        targets += following[segment.valid].tolist()
        for row, line, valid in zip(rows, following, segment.valid, strict=True):
            row += line[valid].tolist()
    assert sorted(targets) == list(range(1, size))
    assert all(np.array_equal(row, np.arange(row[0], row[0] + len(row))) for row in rows)
    assert len(rows) <= streams


def test_one_stream_is_whole_and_carries_its_state_over_documents(make_split):
    split = make_split(b"abc", b"defgh")
    segments = list(EvaluationStream(split, 3))
    assert [segment.tokens[0].tolist() for segment in segments] == [list(b"abcd"), list(b"defg"), list(b"gh")]
    assert all(segment.valid.all() and segment.reset is None for segment in segments)
    assert len(EvaluationStream(split, 3)) == 3


def test_the_first_token_is_charged_by_the_vocabulary(make_split):
    split = make_split(b"12345678")
    stream = EvaluationStream(split, 4)
    assert stream.bits_per_byte(7 * log(2)) == pytest.approx((7 + 8) / 8)
    uniform = 7 * log(256)
    assert stream.bits_per_byte(uniform) == pytest.approx(log2(256))


def test_wrong_sizes_are_told(make_split):
    with pytest.raises(KinformerError, match="length is 0 and streams is 1 but both must be at least 1"):
        EvaluationStream(make_split(b"1234"), 0)
    with pytest.raises(KinformerError, match="both must be at least 1"):
        EvaluationStream(make_split(b"1234"), 2, 0)
