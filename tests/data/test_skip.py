"""What is skipped and what is taken are the whole, in tokens, bytes, documents and marks."""

import numpy as np
import pytest

from kinformer.lab.data import open_corpus, train_tokenizer


@pytest.fixture
def folder(tmp_path):
    """Three documents."""
    folder = tmp_path / "documents"
    folder.mkdir()
    text = "".join(f"line {number} of naïve € text\n" for number in range(200)).encode()
    for number, size in enumerate((3000, 700, 2000)):
        (folder / f"{number}.txt").write_bytes(text[:size])
    return folder


def check(split, length):
    head, tail = split.take(length), split.skip(length)
    assert len(head) + len(tail) == len(split) and head.bytes + tail.bytes == split.bytes
    both = np.concatenate([head.tokens(0, len(head)), tail.tokens(0, len(tail))])
    assert np.array_equal(both, split.tokens(0, len(split)))
    assert tail.text.tokens(0, tail.bytes).tobytes() == split.text.tokens(head.bytes, tail.bytes).tobytes()
    assert np.array_equal(np.concatenate([head.documents, tail.documents + len(head)]), split.documents)
    return head, tail


@pytest.mark.parametrize("length", [1, 2000, 2700, 2701, 4000])
@pytest.mark.parametrize("held", [True, False])
def test_bytes(folder, length, held):
    split = open_corpus(str(folder)).splits["train"]
    if not held:
        split.extents._held = None
    head, tail = check(split, length)
    assert (len(head), head.skip(0).bytes) == (length, length)
    check(tail, len(tail) // 2)


def test_tokens_of_a_tokenizer(folder, tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = train_tokenizer(open_corpus(str(folder)).splits["train"], 300, tmp_path / "tokenizer.json")
    split = open_corpus(str(folder), tokenizer=tokenizer, cache=tmp_path).splits["train"]
    for length in (5, len(split) // 2, len(split) - 3):
        _, tail = check(split, length)
        assert np.array_equal(tail.marks[0], [0, 0]) and np.array_equal(tail.marks[-1], [len(tail), tail.bytes])
