"""Opening data: what belongs to it, how it is split, what it is called, what goes wrong."""

import io
import json
import os
import pickle
import platform
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from kinformer.lab.data import corpus as corpus_module
from kinformer.lab.data import files as extents
from kinformer.lab.data import open_corpus, spool
from kinformer.lab.data.files import Extent, Extents, atomic_write
from kinformer.runtime.errors import KinformerError

HUGE = """
import resource, sys
import numpy as np
from kinformer.lab.data import EvaluationStream, RandomWindows, open_corpus
with open("/proc/self/status") as status:
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), taken + (256 << 20)))
corpus = open_corpus(sys.argv[1])
train = corpus.splits["train"]
batch = RandomWindows(train, 16, 4096, seed=0).batch(12345)
first = next(iter(EvaluationStream(corpus.splits["test"], 1024)))
assert "torch" not in sys.modules
print(len(train), corpus.fingerprint[:14], batch.shape, int(batch.sum()), first.tokens.shape)
"""


def files_of(split):
    return {piece.path for piece in split.extents.pieces}


def test_the_standard_library_is_the_default():
    corpus = open_corpus()
    assert (corpus.name, corpus.version) == ("stdlib", f"CPython {platform.python_version()}")
    sizes = corpus.identity["bytes"]
    total = sum(sizes.values())
    assert total > 5_000_000
    assert 0.04 < sizes["validation"] / total < 0.06
    assert 0.04 < sizes["test"] / total < 0.06
    names = [path.split(os.sep) for split in corpus.splits.values() for path in files_of(split)]
    assert all(name[-1].endswith(".py") for name in names)
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(name) for name in names)
    assert open_corpus().identity == corpus.identity == json.loads(json.dumps(corpus.identity))


def test_a_folder_is_split_by_file(folder):
    corpus = open_corpus(str(folder))
    parts = {name: files_of(split) for name, split in corpus.splits.items()}
    assert all(first.isdisjoint(second) for first, second in combinations(parts.values(), 2))
    assert len(set.union(*parts.values())) == 40
    for split in corpus.splits.values():
        assert split.tokens(0, len(split)).tobytes() == b"".join(open_bytes(p.path) for p in split.extents.pieces)
        assert list(files_of(split)) and [p.path for p in split.extents.pieces] == sorted(files_of(split))
        assert all(split.tokens(int(start), 1) != split.tokens(int(start) - 1, 1) for start in split.documents[1:])
    sizes = corpus.identity["bytes"]
    assert sizes["validation"] <= 0.05 * sum(sizes.values()) and sizes["test"] <= 0.05 * sum(sizes.values())


def open_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def test_every_part_of_ten_files_gets_one(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 100)
    splits = open_corpus(str(tmp_path)).splits
    assert {name: len(split.documents) for name, split in splits.items()} == {"train": 8, "validation": 1, "test": 1}


def test_many_files_of_which_one_is_nearly_all_are_split_within_each(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * (20 if number else 100_000))
    splits = open_corpus(str(tmp_path)).splits
    assert {name: len(split.documents) for name, split in splits.items()} == {"train": 20, "validation": 20, "test": 20}
    assert len(splits["train"]) == 90_000 + 19 * 18


def test_a_folder_of_few_files_is_split_within_each(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    corpus = open_corpus(str(tmp_path))
    assert corpus.identity["bytes"] == {"train": 1800, "validation": 100, "test": 100}
    assert corpus.splits["validation"].documents.tolist() == [0, 50]
    assert corpus.splits["test"].tokens(0, 100).tobytes() == b"a" * 50 + b"b" * 50


def test_hidden_and_empty_files_and_linked_folders_are_no_data(tmp_path, folder):
    before = open_corpus(str(folder)).identity
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "odd" / ".notes").write_text("hidden")
    (folder / "empty").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more").write_text("more")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert open_corpus(str(folder)).identity == before
    (folder / "seen").write_text("data")
    assert open_corpus(str(folder)).fingerprint != before["fingerprint"]


def test_a_file_is_split_by_position_between_characters(text_file):
    data = text_file.read_bytes()
    splits = open_corpus(str(text_file)).splits
    parts = [splits[name].tokens(0, len(splits[name])).tobytes() for name in ("train", "validation", "test")]
    assert b"".join(parts) == data
    assert 0 <= len(parts[0]) - int(0.9 * len(data)) <= 3
    assert all(part.decode("utf-8") for part in parts)
    (text_file.parent / "euros").write_text("€" * 10, encoding="utf-8")
    assert [len(s) for s in open_corpus(str(text_file.parent / "euros")).splits.values()] == [27, 3, 0]


def test_holdout_holds_out_the_last_part_as_validation_and_test(tmp_path, folder):
    path = tmp_path / "digits"
    path.write_bytes(bytes(range(100)))
    splits = open_corpus(str(path), holdout=0.2).splits
    assert splits["train"].tokens(0, 80).tolist() == list(range(80))
    assert splits["test"].tokens(0, 20).tolist() == splits["validation"].tokens(0, 20).tolist() == list(range(80, 100))
    by_file = open_corpus(str(folder), holdout=0.2).splits
    assert files_of(by_file["test"]) == files_of(by_file["validation"])
    assert files_of(by_file["test"]).isdisjoint(files_of(by_file["train"]))
    for wrong in (0.0, 1.0, -0.1, 90.0):
        with pytest.raises(KinformerError, match="must be above 0 and below 1"):
            open_corpus(str(path), holdout=wrong)


def test_a_fingerprint_follows_contents_and_relative_names(tmp_path, folder):
    file, copy = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_bytes(b"the same bytes" * 10)
    copy.write_bytes(file.read_bytes())
    assert open_corpus(str(file)).fingerprint == open_corpus(str(copy)).fingerprint
    copy.write_bytes(b"The same bytes" * 10)
    assert open_corpus(str(file)).fingerprint != open_corpus(str(copy)).fingerprint
    before = open_corpus(str(folder)).fingerprint
    moved = folder.rename(tmp_path / "moved")
    assert open_corpus(str(moved)).fingerprint == before
    (moved / "odd" / "01.txt").rename(moved / "odd" / "1.txt")
    assert open_corpus(str(moved)).fingerprint != before


def test_a_large_corpus_is_sampled_to_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "HASHED_WHOLE", 10_000)
    monkeypatch.setattr(corpus_module, "HASHED_WHOLE", 10_000)
    monkeypatch.setattr(extents, "_BLOCK", 100)
    path = tmp_path / "large"
    data = bytearray(50_000)
    path.write_bytes(data)
    before = open_corpus(str(path)).fingerprint
    assert before.startswith("sampled-sha256:")
    for position in (0, 49_999):
        data[position] = 1
        path.write_bytes(data)
        assert open_corpus(str(path)).fingerprint != before
        data[position] = 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_gigabytes_open_in_little_address_space(tmp_path):
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=2)[:2] == [str(int((10 << 30) * 0.9)), "sampled-sha256"]
    assert done.stdout.strip().endswith("(16, 4097) 0 (1, 1025)")


def test_standard_input_is_spooled_to_a_file(tmp_path):
    path = spool(io.BytesIO(b"piped " * 1000), tmp_path)
    corpus = open_corpus(str(path))
    assert (corpus.name, sum(corpus.identity["bytes"].values())) == ("standard-input", 6000)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    with atomic_write(path) as file:
        file.write(b"old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write(b"half of the new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(KinformerError, match=r"below cannot be written \(.*\); choose"), atomic_write(path / "below"):
        pass


def test_extents_read_across_pieces_from_disk_and_from_memory(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdef")
    run = Extents(
        [Extent(str(tmp_path / "a"), 7, 3), Extent(str(tmp_path / "b"), 1, 0), Extent(str(tmp_path / "b"), 1, 4)]
    )
    whole = b"789bcde"
    for way in (run, pickle.loads(pickle.dumps(run)), Extents(run.pieces).load()):
        for start in range(8):
            for stop in range(start, 8):
                assert way.read(start, stop) == whole[start:stop]
                assert way.part(0, stop).read(start, stop) == whole[start:stop]
        with pytest.raises(IndexError):
            way.read(0, 8)


def test_many_files_do_not_stay_open(tmp_path):
    pieces = []
    for number in range(300):
        (tmp_path / str(number)).write_bytes(bytes([number % 256]) * 2)
        pieces.append(Extent(str(tmp_path / str(number)), 0, 2))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    run = Extents(pieces)
    assert run.read(0, 600) == np.repeat(np.arange(300) % 256, 2).astype(np.uint8).tobytes()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 64
        del run
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_data_is_told_in_a_sentence(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        "missing.txt": "does not exist",
        "empty.txt": "is empty",
        "nothing": "does not hold a regular file",
        "pipe": "is neither a regular file nor a folder",
    }.items():
        with pytest.raises(KinformerError, match=rf"{name} {reason}.*; "):
            open_corpus(str(tmp_path / name))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_bytes(b"secret" * 100)

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(KinformerError, match=r"secret.txt cannot be read \(Permission denied\); check"):
        open_corpus(str(path))


def test_a_file_cut_while_in_use_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "HELD_IN_MEMORY", 0)
    path = tmp_path / "shrinking.txt"
    path.write_bytes(b"x" * 1000)
    split = open_corpus(str(path)).splits["train"]
    path.write_bytes(b"x" * 500)
    with pytest.raises(KinformerError, match="shrinking.txt ended 400 bytes early at byte 500"):
        split.tokens(0, 900)
