"""Tables of what follows every token's neighbours: never its own entry, whatever kills the build."""

from functools import partial

import numpy as np
import pytest
import torch

from kinformer.core.parts import Neighbours
from kinformer.lab.datastore import retrieval
from kinformer.lab.datastore.retrieval import NeighbourTable, neighbours_of, neighbours_without_self, others, table
from kinformer.lab.datastore.search import ExactSearch
from kinformer.runtime.errors import KinformerError
from tests.memory.stores import entries, write

COUNT, FIRST, TOKENS, NEAR = 400, 50, 300, 3


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "_BLOCK", 64)
    return write(tmp_path / "store", COUNT, dtype="float32")


def planned(near=NEAR, tokens=TOKENS):
    return NeighbourTable(name="train", tokens=tokens, neighbours=near, source={"first": FIRST})


def built(store, plan=None, progress=None):
    plan = plan or planned()
    return table(store, plan, partial(neighbours_without_self, store, ExactSearch(store), FIRST, plan), progress)


def test_an_entry_is_never_its_own_neighbour(store):
    got = built(store)
    keys = store.float_keys(slice(0, COUNT))
    distances = torch.cdist(keys, keys).fill_diagonal_(torch.inf)
    nearest = distances[FIRST : FIRST + TOKENS].topk(NEAR, largest=False).indices
    assert got.dtype == np.int32 and np.array_equal(got, store.tokens[nearest.numpy()])
    assert not (got == store.tokens[FIRST : FIRST + TOKENS, None]).any()  # tokens here are nearly all unlike


def test_an_own_entry_among_equal_keys_is_left_out_and_a_small_store_leaves_gaps(tmp_path):
    found = Neighbours(torch.zeros(2, 3), torch.tensor([[5, 6, 7], [5, 6, 0]]), torch.tensor([[1, 0, 2], [1, 0, -1]]))
    assert others(found, torch.tensor([0, 2]), 2).tolist() == [[5, 7], [5, 6]]
    assert others(found, torch.tensor([0, 1]), 3).tolist() == [[5, 7, -1], [6, -1, -1]]
    small = write(tmp_path / "small", 2)
    plan = NeighbourTable(name="train", tokens=2, neighbours=4, source={})
    got = table(small, plan, partial(neighbours_without_self, small, ExactSearch(small), 0, plan))
    assert got.tolist() == [[small.tokens[1], -1, -1, -1], [small.tokens[0], -1, -1, -1]]


def test_a_killed_build_goes_on_to_the_same_rows(store):
    whole, plan = np.array(built(store)), planned(near=NEAR + 1)

    def kill(done, total):
        if done == 192:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(store, plan, kill)
    with plan.path(store).open("ab") as file:
        file.write(b"half a row")
    seen = []
    assert np.array_equal(built(store, plan, lambda done, total: seen.append(done))[:, :NEAR], whole)
    assert seen == [256, 300]
    built(store, plan, lambda done, total: pytest.fail("it was whole"))


def test_keys_of_a_text_are_looked_up_from_where_it_had_come_to(store):
    keys, _ = entries(100, seed=5)
    found = ExactSearch(store).search(keys, NEAR).tokens.numpy()
    plan = planned(tokens=100)
    for done in (0, 30, 64, 99):
        rows = list(neighbours_of(iter(keys.split(40)), ExactSearch(store), plan, done))
        assert np.array_equal(np.concatenate(rows), found[done:])


def test_damage_is_told(store):
    built(store)
    path = planned().path(store)
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\1\2\3\4")
    with pytest.raises(KinformerError, match="is damaged"):
        built(store)
    path.write_bytes(data[:-4])
    assert built(store).tobytes() == data
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(KinformerError, match="does not belong to this table"):
        built(store)


def test_another_store_has_another_table(store, tmp_path):
    other = write(tmp_path / "other", COUNT, seed=1, dtype="float32")
    assert planned().path(store).name != planned().path(other).name
    assert planned().path(store).name != planned(near=2).path(store).name
