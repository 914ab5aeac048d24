"""Approximate search: right where it looks, resumable, appendable, and never of another store."""

import json
import sys

import pytest
import torch

from kinformer.lab.datastore import search as sorting
from kinformer.lab.datastore.attach import searcher
from kinformer.lab.datastore.search import _SPARE_LISTS, ExactSearch, ListSearch, build
from kinformer.lab.datastore.store import Datastore
from kinformer.runtime.errors import KinformerError
from tests.memory.stores import DIM, entries, write

QUERIES = entries(64, seed=7)[0]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(sorting, "_SHARD", 700)
    monkeypatch.setattr(sorting, "_BLOCK", 90)


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss")


def recall(store, found, neighbours=10, stop=None):
    true = ExactSearch(store, entries=stop).search(QUERIES, neighbours).entries
    return float((true[:, :, None] == found.entries[:, None]).any(2).double().mean())


def test_all_lists_are_exact_and_few_are_near_it(tmp_path, faiss):
    store = write(tmp_path, 2000)
    assert build(store).count == 44
    exact = ExactSearch(store).search(QUERIES, 10)
    search = ListSearch(store, 44)
    found = search.search(QUERIES, 10)
    assert torch.equal(found.entries, exact.entries) and torch.equal(found.tokens, exact.tokens)
    assert (found.distances - exact.distances).abs().max() < 1e-5
    few = ListSearch(store, 8)
    assert recall(store, few.search(QUERIES, 10)) > 0.9
    assert 0 < few.bytes_read < search.bytes_read
    assert search.bytes_read == 2000 * (DIM + 8) + 64 * 20 * DIM * 2


def test_a_prefix_can_be_searched(tmp_path, faiss):
    store = write(tmp_path, 2000)
    build(store, 20)
    for stop in (1, 30, 700, 900):
        found = ListSearch(store, 20, entries=stop).search(QUERIES, 10)
        assert found.entries.max() < stop and found.entries.shape == (64, min(10, stop))
        assert recall(store, found, stop=stop) > 0.98


def test_missing_neighbours_are_marked(tmp_path, faiss):
    store = write(tmp_path, 100)
    build(store, 50)
    found = ListSearch(store, 1).search(QUERIES, 20)
    missing = found.entries < 0
    assert missing.any() and not missing.all()
    assert torch.equal(found.distances.isinf(), missing)
    assert not found.tokens[missing].any()
    assert (missing.long().diff(dim=1) >= 0).all()


def test_appended_entries_are_sorted_in(tmp_path, faiss):
    write(tmp_path, 1000)
    store = write(tmp_path, 1000)
    first = build(store, 16)
    store = write(tmp_path, 500, seed=1)
    with pytest.raises(KinformerError, match="lists hold 1,000 entries, but the store holds 1,500"):
        ListSearch(store, 4)
    stamp = (tmp_path / "lists" / "shard-0-700.faiss").stat().st_mtime_ns
    again = build(store)
    assert (again.count, again.entries) == (first.count, 1500)
    assert set(again.shards) == {path.name for path in (tmp_path / "lists").glob("shard-*")}
    assert (tmp_path / "lists" / "shard-0-700.faiss").stat().st_mtime_ns == stamp
    assert recall(store, ListSearch(store, 16).search(QUERIES, 10)) > 0.97
    store = write(tmp_path, 500, seed=2)
    assert (build(store).count, build(store).trained_on) == (44, 2000)
    assert recall(store, ListSearch(store, 44).search(QUERIES, 10)) > 0.99
    assert build(store, 10).count == 10
    assert recall(store, ListSearch(store, 10).search(QUERIES, 10)) > 0.99


def test_a_killed_build_goes_on(tmp_path, faiss, monkeypatch):
    store = write(tmp_path, 2000)
    written = []

    def mortal(index, path):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        faiss.write_index(index, str(path))

    monkeypatch.setattr(sorting, "_write_index", mortal)
    with pytest.raises(KeyboardInterrupt):
        build(store, 12)
    with pytest.raises(KinformerError, match="not sorted into lists"):
        ListSearch(store, 2)
    monkeypatch.undo()
    monkeypatch.setattr(sorting, "_SHARD", 700)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "lists").glob("shard-*")}
    assert len(kept) == 2
    build(store, 12)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert recall(store, ListSearch(store, 12).search(QUERIES, 10)) > 0.99


def test_damaged_and_foreign_lists_are_refused(tmp_path, faiss):
    store = write(tmp_path / "one", 1000)
    build(store, 10)
    other = write(tmp_path / "two", 1000, seed=3)
    (tmp_path / "one" / "lists").rename(tmp_path / "two" / "lists")
    with pytest.raises(KinformerError, match="its lists hold"):
        ListSearch(other, 2)
    with pytest.raises(KinformerError, match="probes is 11 but must be 1 to 10"):
        build(other, 10)
        ListSearch(other, 11)
    record = tmp_path / "two" / "lists" / "lists.json"
    text = record.read_text()
    record.write_text(text.replace('"trained_on": 1000', '"trained_on": 1001'))
    with pytest.raises(KinformerError, match="lists.json: has been altered"):
        ListSearch(other, 2)
    record.write_text(text)
    shard = tmp_path / "two" / "lists" / "shard-0-700.faiss"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(KinformerError, match="truncated or damaged"):
        ListSearch(other, 2)
    with pytest.raises(KinformerError, match="1,001 lists cannot be made: .* holds 1,000 entries; give fewer"):
        build(store, 1001)


def test_without_faiss_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(KinformerError, match=r"needs faiss, which is not installed; pip install 'kinformer\[knn\]'"):
        build(write(tmp_path))


def test_altered_lists_are_refused(tmp_path, faiss):
    store = write(tmp_path, 1000)
    build(store, 10)
    folder = tmp_path / "lists"
    for name in ("shard-0-700.faiss", "trained.faiss"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(KinformerError, match=f"{name} does not match its checksum"):
            ListSearch(store, 2)
        (folder / name).write_bytes(whole)
    ListSearch(store, 2)
    record = folder / "lists.json"
    (tmp_path / "shard-0-700.faiss").write_bytes((folder / "shard-0-700.faiss").read_bytes())
    unsigned = {name: value for name, value in json.loads(record.read_text()).items() if name != "checksum"}
    record.write_text(json.dumps(unsigned).replace("shard-0-700", "../shard-0-700"))
    with pytest.raises(KinformerError, match="is not the name of a shard"):
        ListSearch(store, 2)


def brute_force(store, neighbours, similarity):
    keys = store.float_keys(slice(0, store.entries))
    gaps = -(QUERIES @ keys.T) if similarity == "inner" else torch.cdist(QUERIES, keys).square()
    return gaps.sort(dim=1, stable=True).indices[:, :neighbours]


@pytest.mark.parametrize("similarity", ["l2", "inner"])
@pytest.mark.parametrize("key_bytes", [None, 4])
def test_every_similarity_and_code_is_brute_force_where_all_is_searched(tmp_path, faiss, similarity, key_bytes):
    """Exact search is brute force; lists find it again if all are searched, or nearly, where their keys are coarse."""
    store = write(tmp_path, 2000)
    lists_ = build(store, 20, key_bytes=key_bytes, similarity=similarity)
    assert (lists_.codec, lists_.similarity) == (f"PQ{key_bytes}" if key_bytes else "SQ8", similarity)
    exact = ExactSearch(store, similarity=similarity).search(QUERIES, 10)
    assert torch.equal(exact.entries, brute_force(store, 10, similarity))
    search = ListSearch(Datastore(tmp_path), 20, similarity=similarity)
    found = search.search(QUERIES, 10)
    shared = float((exact.entries[:, :, None] == found.entries[:, None]).any(2).double().mean())
    assert shared == 1 if key_bytes is None else shared > 0.97
    if similarity == "inner":
        keys = store.float_keys(found.entries.numpy())
        assert torch.allclose(found.distances, -(keys * QUERIES[:, None]).sum(2), atol=1e-4)
        assert (found.distances.diff(dim=1) >= 0).all()
    assert search.bytes_read == 2000 * ((key_bytes or DIM) + 8) + 64 * (80 if key_bytes else 20) * DIM * 2


def test_product_quantisation_finds_more_with_more_bytes_and_grows_as_it_was_made(tmp_path, faiss, monkeypatch):
    monkeypatch.setitem(_SPARE_LISTS, "PQ", 1)
    write(tmp_path, 2000)
    store, shares = write(tmp_path, 2000), []
    for key_bytes in (1, 2, 8):
        build(store, 20, key_bytes=key_bytes)
        shares.append(recall(store, ListSearch(store, 20).search(QUERIES, 10)))
    assert shares[0] < shares[1] < shares[2] and shares[2] > 0.9
    store = write(tmp_path, 300, seed=1)
    again = build(store)
    assert (again.codec, again.count, again.trained_on) == ("PQ8", 20, 2000)
    assert recall(store, ListSearch(store, 20).search(QUERIES, 10)) > 0.7
    assert build(store, key_bytes=4).trained_on == 2300


def test_codes_and_similarities_that_do_not_fit_are_refused(tmp_path, faiss):
    store = write(tmp_path, 2000)
    with pytest.raises(KinformerError, match="key_bytes 3: does not divide the 8 numbers of a key"):
        build(store, key_bytes=3)
    build(store, 20, similarity="inner")
    with pytest.raises(KinformerError, match="its lists are of the similarity 'inner', not 'l2'"):
        ListSearch(store, 4)
    found = searcher(store, None)
    assert isinstance(found, ExactSearch) and found.similarity == "inner"  # as its lists were made
    assert searcher(store, 4).similarity == "inner" and searcher(store, None, similarity="l2").similarity == "l2"
    with pytest.raises(KinformerError, match="one of 256 centroids"):
        build(write(tmp_path / "few", 100), key_bytes=4)
