from __future__ import annotations

import numpy as np
import pytest

from kinformer.lab.data import IGNORED, BosEos, Buckets, Examples, Rows
from kinformer.lab.data.buckets import POOL
from kinformer.runtime.errors import KinformerError

ENDS = BosEos(257, 258)


def examples(number: int, longest: int = 300) -> Examples:
    """Example i has its own number as first token, so that it can be told; lengths are as unlike as can be."""
    draw = np.random.default_rng(0)
    texts = [np.full(draw.integers(1, longest), index % 250, np.uint8) for index in range(number)]
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return Examples("train", np.concatenate(texts), starts, np.arange(number, dtype=np.int64))


def test_each_example_once_an_epoch() -> None:
    data = examples(POOL * 4)
    sampler = Buckets(data, 4, 512, seed=1)
    for epoch in (0, 1):
        labels = [sampler.batch(epoch * POOL + step).labels for step in range(POOL)]
        assert sorted(np.concatenate(labels).tolist()) == list(range(POOL * 4))
    assert sampler.indices(0).tolist() != sampler.indices(POOL).tolist()


def test_a_step_is_a_function_of_its_number_and_processes_share_it() -> None:
    data = examples(100)
    sampler, again = (Buckets(data, 6, 64, seed=1, ends=ENDS) for _ in range(2))
    for step in (70, 3, 200):
        whole = again.batch(step)
        thirds = [sampler.batch(step, rank, 3) for rank in range(3)]
        assert np.array_equal(np.concatenate([rows.tokens for rows in thirds]), whole.tokens)
        assert np.array_equal(np.concatenate([rows.labels for rows in thirds]), whole.labels)
    assert not np.array_equal(Buckets(data, 6, 64, seed=2).indices(0), sampler.indices(0))


def test_little_is_padding() -> None:
    sampler = Buckets(examples(2000, 1000), 8, 1000, seed=0)
    rows = [sampler.batch(step) for step in range(2 * POOL)]
    valid = sum(int(each.valid.sum()) if each.valid is not None else each.tokens.size for each in rows)
    assert valid / sum(each.tokens.size for each in rows) > 0.9
    widths = {each.tokens.shape[1] for each in rows}
    assert len(widths) <= 16 and all(width % 64 == 0 or width == 1000 for width in widths)
    order = [each.tokens.shape[1] for each in rows[:POOL]]
    assert order != sorted(order)


def test_cut_to_the_length_between_bos_and_eos() -> None:
    data = examples(40)
    sampler = Buckets(data, 5, 20, seed=0, ends=ENDS)
    for rows in sampler.in_order():
        for row in range(len(rows.tokens)):
            kept = np.ones(20, bool) if rows.valid is None else rows.valid[row]
            tokens, index = rows.tokens[row][kept], rows.labels[row]
            assert tokens[0] == 257 and tokens[-1] == 258
            assert tokens[1:-1].tolist() == data.tokens(index)[:18].tolist()
    assert sorted(np.concatenate([rows.labels for rows in sampler.in_order()]).tolist()) == list(range(40))
    assert sum(len(rows.labels) for rows in sampler.in_order(7)) == 7
    with pytest.raises(KinformerError, match="length 2"):
        Buckets(data, 5, 2, seed=0, ends=ENDS)


def test_shares_are_equal_and_nothing_counts_twice() -> None:
    rows = Rows(np.arange(15).reshape(5, 3), None, np.arange(5), np.arange(10).reshape(5, 2))
    shares = [rows.share(rank, 2) for rank in (0, 1)]
    assert [share.labels.tolist() for share in shares] == [[0, 1, 2], [3, 4, IGNORED]]
    assert shares[1].tokens.tolist()[2] == rows.tokens[4].tolist() and shares[1].positions is not None
    alone = [Rows(rows.tokens[:1], None, np.zeros((1, 2), np.int64)).share(rank, 3).labels for rank in range(3)]
    assert [labels.tolist() for labels in alone] == [[[0, 0]], [[IGNORED] * 2], [[IGNORED] * 2]]
