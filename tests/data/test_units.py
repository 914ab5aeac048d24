"""Units of lines: their ends, their sizes, and that a model takes them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kinformer
from kinformer.core.errors import KinformerError
from kinformer.data.units import line_units


def rows(*texts):
    return np.stack([np.frombuffer(text, np.uint8).astype(np.int64) for text in texts])


def test_lines_go_together_up_to_a_length():
    tokens = rows(b"ab\nc\n\ndefghijk\nl", b"................")
    assert line_units(tokens, longest=6).tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
    ]
    assert line_units(tokens, longest=3)[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5]
    assert line_units(rows(b"ab\ncd\nef"), longest=5).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


@given(text=st.text("ab\n", min_size=1, max_size=40), longest=st.integers(1, 9))
def test_units_are_runs_that_end_with_lines_unless_a_line_is_longer(text, longest):
    tokens = rows(text.encode())
    units = line_units(tokens, longest)[0]
    assert units[0] == 0 and set(np.diff(units)) <= {0, 1}
    assert np.bincount(units).max() <= longest
    for end in np.flatnonzero(np.diff(units)) + 1:
        start = int(np.flatnonzero(units == units[end - 1])[0])
        assert text[end - 1] == "\n" or (end - start == longest and "\n" not in text[start:end])


def test_a_model_takes_them():
    torch.manual_seed(0)
    model = kinformer.build("etc", recipe="tiny", vocab_size=259)
    tokens = rows(b"a line\nanother\n\nand a third one")
    units = torch.from_numpy(line_units(tokens, longest=16))
    encoded = model.hidden(torch.from_numpy(tokens), units=units)
    assert encoded.side.shape == (1, int(units.max()) + 1, 32)
    with pytest.raises(KinformerError, match="longest must be 1 token"):
        line_units(tokens, longest=0)
