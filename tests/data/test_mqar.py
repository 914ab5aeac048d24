"""Multi-query associative recall: what is asked is what a dictionary holds; keys come again mostly soon."""

import numpy as np
import pytest

from kinformer.lab.data import IGNORED
from kinformer.lab.data.mqar import Recall
from kinformer.runtime.errors import KinformerError

DATA = Recall(pairs=(3, 8), symbols=40)


@pytest.mark.parametrize("length", [32, 33, 50])
def test_labels_are_what_a_dictionary_holds(length):
    tokens, labels, pairs = DATA.rows("train", 0, 40, length)
    assert tokens.shape == labels.shape == (40, length) and set(pairs.tolist()) == {3, 8}
    for row, asked, number in zip(tokens.tolist(), labels.tolist(), pairs.tolist(), strict=True):
        memory = dict(zip(row[0 : 2 * number : 2], row[1 : 2 * number : 2], strict=True))
        assert len(memory) == len(set(memory.values())) == number
        assert all(1 <= key < 20 <= value < 40 for key, value in memory.items())
        at = [place for place, label in enumerate(asked) if label != IGNORED]
        assert len(at) == number and all(place % 2 == 0 and place >= 2 * number for place in at)
        assert {row[place]: asked[place] for place in at} == memory


def test_most_queries_come_soon_and_the_more_so_the_smaller_the_power():
    def slots(power):
        labels = Recall(pairs=(1,), gap_power=power).rows("train", 0, 4000, 66).labels
        return (np.nonzero(labels != IGNORED)[1] - 2) // 2

    found = np.bincount(slots(0.01), minlength=32) / 4000
    weight = np.arange(1, 33) ** -0.99
    assert np.abs(found - weight / weight.sum()).max() < 0.03
    assert abs(slots(1.0).mean() - 15.5) < 0.5


def test_rows_are_decided_by_split_seed_and_part():
    first, again = (DATA.rows("train", 3, 5, 32, seed=7) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (DATA.rows("test", 3, 5, 32, 7), DATA.rows("train", 4, 5, 32, 7), DATA.rows("train", 3, 5, 32, 8)):
        assert not np.array_equal(other.tokens, first.tokens)


def test_fillers_of_zero():
    tokens, labels, _ = Recall(pairs=(2,), random_fillers=False).rows("train", 0, 20, 30)
    filled = np.ones(tokens.shape, bool)
    filled[:, :4] = False
    assert (tokens[filled & (labels == IGNORED)] == 0).all() and (tokens[labels != IGNORED] > 0).all()


def test_what_cannot_be_made():
    with pytest.raises(KinformerError, match=r"length 31: 8 pairs and as many queries take 32 tokens"):
        DATA.rows("train", 0, 1, 31)
    with pytest.raises(
        KinformerError, match=r"20 pairs must have a key each, but 40 symbols make 19 keys; give symbols 42"
    ):
        DATA.rows("train", 0, 1, 80, pairs=(20,))
