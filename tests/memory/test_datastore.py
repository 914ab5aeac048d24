"""Datastores: what is written is what is read, whatever happens meanwhile; what is not right is refused."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.lab.datastore.search import ExactSearch
from kinformer.lab.datastore.store import KEYS, RECORD, TOKENS, Datastore, Writer
from kinformer.runtime.errors import KinformerError
from tests.memory.stores import DIM, ORIGIN, VOCAB, entries, write


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_written_is_read(tmp_path, dtype):
    store = write(tmp_path / "store", dtype=dtype)
    keys, tokens = entries(1000)
    assert store.entries == 1000 and store.keys.dtype == dtype
    assert torch.equal(store.float_keys(slice(None)), keys.to(getattr(torch, dtype)).float())
    assert np.array_equal(store.tokens, tokens) and tokens.max() > 1 << 17


@pytest.mark.parametrize("kill", [0, 50, 150, 400, 950])
def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path, kill):
    write(tmp_path / "whole")
    folder = tmp_path / "killed"
    write(folder, kill=kill)
    with pytest.raises(KinformerError, match="is not finished"):
        Datastore(folder)
    for name in (KEYS, TOKENS):  # a part of what was not counted may have reached the disk
        with open(folder / name, "ab") as file:
            file.write(b"torn")
    write(folder)
    assert files(folder) == files(tmp_path / "whole")


def test_killed_by_the_system(tmp_path):
    """SIGKILL in the middle of a build: nothing that was flushed is lost."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kinformer.lab.datastore import store as writer; from tests.memory.stores import write\n"
        "append = writer.Writer.append\n"
        "def mortal(self, keys, tokens):\n"
        "    append(self, keys, tokens)\n"
        "    if self.record.entries >= 600: os.kill(os.getpid(), signal.SIGKILL)\n"
        "writer.Writer.append = mortal; write(Path(sys.argv[1]))"
    )
    folder = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert json.loads((folder / RECORD).read_text())["entries"] == 600
    write(folder)
    write(tmp_path / "whole")
    assert files(folder) == files(tmp_path / "whole")


def test_texts_are_appended(tmp_path):
    write(tmp_path / "store", 300)
    store = write(tmp_path / "store", 200, seed=1)
    assert store.entries == 500 and [part.written for part in store.record.parts] == [300, 200]
    assert np.array_equal(store.tokens[300:], entries(200, 1)[1])
    write(tmp_path / "store", 200, seed=1)
    assert Datastore(tmp_path / "store").entries == 500  # it is there already
    write(tmp_path / "store", 400, seed=2, kill=150)
    with pytest.raises(KinformerError, match="another text is not finished"):
        write(tmp_path / "store", 100, seed=3)


def test_truncated_stores_are_refused(tmp_path):
    folder = tmp_path / "store"
    write(folder)
    for name in (KEYS, TOKENS):
        size = (folder / name).stat().st_size
        whole = (folder / name).read_bytes()
        os.truncate(folder / name, size - 1)
        for open_it in (Datastore, lambda folder: Writer(folder, ORIGIN)):
            with pytest.raises(KinformerError, match=f"{name}: is truncated"):
                open_it(folder)
        (folder / name).write_bytes(whole)
    assert Datastore(folder).entries == 1000


@pytest.mark.parametrize("name", [KEYS, TOKENS])
def test_damaged_stores_are_refused(tmp_path, name):
    write(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(KinformerError, match=f"{name}: is damaged"):
        Datastore(tmp_path)


def test_every_piece_is_checked_when_asked(tmp_path):
    write(tmp_path, 3000, flushed=50)
    Datastore(tmp_path, check_all=True)
    width = DIM * 2 * 50
    found = 0
    for block in range(60):
        data = bytearray((tmp_path / KEYS).read_bytes())
        data[block * width] ^= 1
        (tmp_path / KEYS).write_bytes(data)
        with pytest.raises(KinformerError, match="is damaged"):
            Datastore(tmp_path, check_all=True)
        try:
            Datastore(tmp_path)
        except KinformerError:
            found += 1
        data[block * width] ^= 1
        (tmp_path / KEYS).write_bytes(data)
    assert found == 8


def test_no_digit_of_a_record_may_be_another(tmp_path):
    """Not those of a text's source or of the model's digest either, which nothing else vouches for."""
    write(tmp_path)
    text = (tmp_path / RECORD).read_text()
    digits = [index for index, letter in enumerate(text) if letter.isdigit()]
    for index in digits[:: len(digits) // 40]:
        (tmp_path / RECORD).write_text(text[:index] + str((int(text[index]) + 1) % 10) + text[index + 1 :])
        with pytest.raises(KinformerError, match="has been altered|has schema|not readable JSON"):
            Datastore(tmp_path)
    unsigned = {name: value for name, value in json.loads(text).items() if name != "checksum"}
    (tmp_path / RECORD).write_text(json.dumps(unsigned))  # as it was written before there were checksums
    assert Datastore(tmp_path).entries == 1000


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 99},
        {"entries": 999},
        {"dtype": "int8"},
        {"blocks": [[5, 0, 0], [3, 0, 0]]},
        {"parts": None},
        {"origin": {"dim": 8}},
    ],
)
def test_damaged_records_are_refused(tmp_path, change):
    write(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    with pytest.raises(KinformerError, match="has been altered|has schema"):
        (tmp_path / RECORD).write_text(json.dumps(record | change))
        Datastore(tmp_path)
    del record["checksum"]
    with pytest.raises(KinformerError, match="is damaged|has schema"):
        (tmp_path / RECORD).write_text(json.dumps(record | change))
        Datastore(tmp_path)
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(KinformerError, match="not readable JSON"):
        Datastore(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("weights", "x", "other weights"),
        ("representation", "x", "not its 'x'"),
        ("dim", 9, "8 numbers, not 9"),
        ("vocab_size", 256, "vocabulary of 300000, not 256"),
        ("tokenizer", "x", "another tokenizer"),
    ],
)
def test_foreign_stores_are_refused(tmp_path, field, value, told):
    write(tmp_path)
    foreign = replace(ORIGIN, **{field: value})
    for open_it in (Datastore, Writer):
        with pytest.raises(KinformerError, match=f"belongs to another model .*{told}"):
            open_it(tmp_path, foreign)


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(KinformerError, match="is not a datastore"):
        Datastore(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KinformerError, match="neither a datastore nor an empty folder"):
        Writer(tmp_path, ORIGIN)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_one_process_writes_at_a_time(tmp_path):
    with Writer(tmp_path, ORIGIN), pytest.raises(KinformerError, match="another process is writing"):
        Writer(tmp_path, ORIGIN)
    with pytest.raises(KinformerError, match="holds keys of float16"):
        Writer(tmp_path, ORIGIN, dtype="float32")


def test_keys_that_do_not_fit_are_refused(tmp_path):
    with Writer(tmp_path, ORIGIN) as writer:
        writer.begin({}, 1)
        with pytest.raises(KinformerError, match="too large for float16"):
            writer.append(torch.full((1, DIM), 1e6), np.zeros(1))
        with pytest.raises(KinformerError, match="the run diverged"):
            writer.append(torch.full((1, DIM), torch.nan), np.zeros(1))


def test_the_state_goes_with_the_flush(tmp_path):
    with Writer(tmp_path, ORIGIN) as writer:
        writer.begin({}, 3)
        for number in range(3):
            writer.append(torch.zeros(1, DIM), np.zeros(1))
            writer.flush([torch.full((2,), float(number))] if number < 2 else ())
            kept = writer.load_state()
            assert [leaf.tolist() for leaf in kept] == ([[number, number]] if number < 2 else [])
    assert {path.name for path in tmp_path.iterdir()} == {RECORD, KEYS, TOKENS}


def brute(store, queries, count, stop=None):
    keys = store.float_keys(slice(0, stop))
    distances = (queries[:, None].double() - keys.double()).square().sum(2)
    return distances.sort(dim=1, stable=True).values[:, :count], distances.argsort(dim=1, stable=True)[:, :count]


@pytest.mark.parametrize("stop", [None, 1, 7, 640])
def test_exact_search_is_exact(tmp_path, monkeypatch, stop):
    from kinformer.lab.datastore import search as exact

    monkeypatch.setattr(exact, "_BLOCK", 100)
    monkeypatch.setattr(exact, "_ROWS", 7)
    monkeypatch.setattr(exact, "_GATHERED", 500)
    store = write(tmp_path)
    queries = entries(30, seed=5)[0]
    search = ExactSearch(store, entries=stop)
    found = search.search(queries, 9)
    distances, numbers = brute(store, queries, 9, stop)
    assert torch.equal(found.entries, numbers)
    assert (found.distances - distances).abs().max() < 1e-4
    assert np.array_equal(found.tokens, store.tokens[found.entries])
    assert search.bytes_read == -(-30 // 7) * (stop or 1000) * DIM * 2


def test_a_key_is_its_own_nearest(tmp_path):
    store = write(tmp_path, dtype="float32")
    found = ExactSearch(store).search(store.float_keys(slice(0, 1000)), 1)
    assert torch.equal(found.entries[:, 0], torch.arange(1000))
    assert not found.distances.any()


def test_of_equal_keys_the_first_come_first(tmp_path):
    with Writer(tmp_path, ORIGIN) as writer:
        writer.begin({}, 40)
        writer.append(torch.ones(40, DIM), np.arange(40))
        writer.flush()
    found = ExactSearch(Datastore(tmp_path)).search(torch.zeros(2, DIM), 40)
    assert found.entries.tolist() == [list(range(40))] * 2
    assert found.distances.unique().tolist() == [DIM]


def test_bad_queries_are_told(tmp_path):
    search = ExactSearch(write(tmp_path))
    with pytest.raises(KinformerError, match=r"queries must be \[n, 8\]"):
        search.search(torch.zeros(3, DIM + 1), 2)
    with pytest.raises(KinformerError, match="neighbours is 0"):
        search.search(torch.zeros(3, DIM), 0)
    with pytest.raises(KinformerError, match="entries is 1001"):
        ExactSearch(search.store, entries=1001)


def test_ids_outside_the_vocabulary_are_damage(tmp_path):
    with Writer(tmp_path, ORIGIN) as writer:
        writer.begin({}, 1)
        writer.append(torch.ones(1, DIM), np.array([VOCAB]))
        writer.flush()
    with pytest.raises(KinformerError, match="ids that no token has"):
        ExactSearch(Datastore(tmp_path)).search(torch.zeros(1, DIM), 1)
