"""Sentences of lines: their ends, their sizes, and that a model takes them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kinformer
from kinformer.lab.data.masking import line_sentences
from kinformer.runtime.errors import KinformerError


def rows(*texts):
    return np.stack([np.frombuffer(text, np.uint8).astype(np.int64) for text in texts])


def test_lines_go_together_up_to_a_length():
    tokens = rows(b"ab\nc\n\ndefghijk\nl", b"................")
    assert line_sentences(tokens, longest=6).tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
    ]
    assert line_sentences(tokens, longest=3)[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5]
    assert line_sentences(rows(b"ab\ncd\nef"), longest=5).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


@given(text=st.text("ab\n", min_size=1, max_size=40), longest=st.integers(1, 9))
def test_sentences_are_runs_that_end_with_lines_unless_a_line_is_longer(text, longest):
    tokens = rows(text.encode())
    sentences = line_sentences(tokens, longest)[0]
    assert sentences[0] == 0 and set(np.diff(sentences)) <= {0, 1}
    assert np.bincount(sentences).max() <= longest
    for end in np.flatnonzero(np.diff(sentences)) + 1:
        start = int(np.flatnonzero(sentences == sentences[end - 1])[0])
        assert text[end - 1] == "\n" or (end - start == longest and "\n" not in text[start:end])


def test_a_model_takes_them():
    torch.manual_seed(0)
    model = kinformer.build("etc", recipe="tiny", vocab_size=259)
    tokens = rows(b"a line\nanother\n\nand a third one")
    sentences = torch.from_numpy(line_sentences(tokens, longest=16))
    encoded = model.hidden(torch.from_numpy(tokens), sentences=sentences)
    assert encoded.global_input.shape == (1, int(sentences.max()) + 1, 32)
    with pytest.raises(KinformerError, match="longest must be 1 token"):
        line_sentences(tokens, longest=0)
