"""The n-gram baseline against the formula written out."""

from collections import Counter
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinformer.lab.data import NgramModel, ngram, open_corpus
from kinformer.runtime.errors import KinformerError


def probability(train, history, byte):
    """Interpolated Witten-Bell, by counting."""
    lower = probability(train, history[1:], byte) if history else 1 / 256
    size = len(history)
    following = Counter(train[i + size] for i in range(len(train) - size) if train[i : i + size] == history)
    if not following:
        return lower
    return (following[byte] + len(following) * lower) / (following.total() + len(following))


@settings(max_examples=40)
@given(
    train=st.lists(st.sampled_from(b"ab\x00\xff"), min_size=8, max_size=60).map(bytes),
    held_out=st.lists(st.sampled_from(b"ab\x00\xffz"), min_size=2, max_size=20).map(bytes),
    context=st.integers(0, 7),
)
def test_it_is_witten_bell(make_split, train, held_out, context):
    model = NgramModel(make_split(train), context)
    expected = [probability(train, held_out[max(0, i - context) : i], held_out[i]) for i in range(len(held_out))]
    assert np.allclose(model.probabilities(np.frombuffer(held_out, np.uint8)), expected, rtol=1e-12)
    bits = 8 - sum(log2(p) for p in expected[1:])
    assert model.bits_per_byte(make_split(held_out)) == pytest.approx(bits / len(held_out), rel=1e-12)


def test_probabilities_of_all_bytes_sum_to_one(make_split):
    model = NgramModel(make_split(b"abracadabra, said the magician"), 3)
    for history in (b"", b"a", b"bra", b"zzz", b"dab"):
        data = [np.frombuffer(history + bytes([byte]), np.uint8) for byte in range(256)]
        assert sum(model.probabilities(row)[-1] for row in data) == pytest.approx(1, abs=1e-12)


def test_blocks_change_nothing(make_split, monkeypatch):
    data = np.random.default_rng(0).choice(list(b"abcd"), 3000).astype(np.uint8).tobytes()
    train, held_out = make_split(data[:2000]), make_split(data[2000:])
    whole = NgramModel(train, 4).bits_per_byte(held_out)
    for block in (1, 7, 1999):
        monkeypatch.setattr(ngram, "_BLOCK", max(block, 3))
        assert NgramModel(train, 4).bits_per_byte(held_out) == pytest.approx(whole, rel=1e-12)


def test_context_helps_on_words(text_file):
    """Of seven words, each of 5.6 bytes with its space, a byte holds at least 0.5 bits: the bound of more context."""
    splits = open_corpus(str(text_file)).splits
    bits = [NgramModel(splits["train"], context).bits_per_byte(splits["test"]) for context in (0, 1, 4)]
    assert bits == pytest.approx([3.981, 1.551, 0.727], abs=1e-3)


def test_wrong_sizes_are_told(make_split):
    with pytest.raises(KinformerError, match="context is 8 but an n-gram model of bytes takes from 0 to 7"):
        NgramModel(make_split(b"12345678"), 8)
    with pytest.raises(KinformerError, match="holds 3 tokens but an n-gram model with 5 bytes of context needs 6"):
        NgramModel(make_split(b"123"), 5)
