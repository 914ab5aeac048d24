"""Token shards hold the ids of a corpus, whoever packs them and however often they are interrupted."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.data import open_corpus, packing, train_tokenizer
from kinformer.lab.data.packed import MANIFEST, PACKED_SPLITS, open_packed, packed_tokenizer
from kinformer.lab.data.packing import Packing, documents_of, pack, pack_stream
from kinformer.lab.data.sampling import Split
from kinformer.lab.data.tokenizer import ByteTokenizer
from kinformer.lab.tasks.next_token import NextTokens
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import signed
from tests.training.tiny import SETTINGS, curve

WORDS = ["wind", "tree", "naïve", "river", "€", "sings", "under"]


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


def ids(split: Split) -> list[int]:
    return split.tokens(0, len(split)).tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of twelve texts."""
    draw = random.Random(0)
    for number in range(12):
        lines = (" ".join(draw.choices(WORDS, k=7)) for _ in range(draw.randint(20, 30)))
        (tmp_path / "texts" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "texts"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """400 documents as JSON lines, each twice."""
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=9)) + f" {number}" for number in range(200)] * 2
    path = tmp_path / "tables" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"body": text, "id": 3}) + "\n" for text in texts), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", [500, 10**9])
def test_shards_of_bytes_are_the_corpus(folder: Path, tmp_path: Path, size: int) -> None:
    pack(Packing(data=str(folder), shard_bytes=size), tmp_path / "shards", 1, silent)
    ours, expected = open_corpus(str(tmp_path / "shards")), open_corpus(str(folder))
    for name in PACKED_SPLITS:
        left, right = ours.splits[name], expected.splits[name]
        assert ids(left) == ids(right) and left.documents.tolist() == right.documents.tolist()
        assert left.bytes == right.bytes
    assert (len(ours.splits["train"].extents.pieces) > 3) == (size == 500)


def test_shards_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    plain = open_corpus(str(folder))
    tokenizer = train_tokenizer(plain.splits["train"], 300, tmp_path / "tokenizer.json")
    kinformer.pack(folder, tmp_path / "shards", tokenizer=tmp_path / "tokenizer.json", workers=1)
    assert packed_tokenizer(tmp_path / "shards").fingerprint == tokenizer.fingerprint
    ours = open_corpus(str(tmp_path / "shards"), tokenizer=tokenizer)
    expected = open_corpus(str(folder), tokenizer=tokenizer, cache=tmp_path / "cache")
    for name in PACKED_SPLITS:
        left, right = ours.splits[name], expected.splits[name]
        assert ids(left) == ids(right) and left.documents.tolist() == right.documents.tolist()
        assert left.bytes == right.bytes and left.take(200).bytes == right.take(200).bytes
        assert left.skip(200).bytes == right.skip(200).bytes
    with pytest.raises(KinformerError, match="the text that they stand for is not there"):
        ours.splits["train"].text.tokens(0, 10)
    with pytest.raises(KinformerError, match="holds ids of another tokenizer"):
        open_corpus(str(tmp_path / "shards"))


@pytest.mark.parametrize("size", [300, 2000, 10**9])
def test_documents_of_json_lines(table: Path, tmp_path: Path, size: int) -> None:
    pack(Packing(data=str(table), text_field="body", shard_bytes=size), tmp_path / "shards", 1, silent)
    seen = {}
    for name, split in open_corpus(str(tmp_path / "shards")).splits.items():
        ends = [*split.documents[1:].tolist(), len(split)]
        seen[name] = [
            split.tokens(start, end - start).tobytes()
            for start, end in zip(split.documents.tolist(), ends, strict=True)
        ]
    texts = [json.loads(line)["body"].encode() + b"\n" for line in table.read_text(encoding="utf-8").splitlines()]
    assert sorted(text for part in seen.values() for text in part) == sorted(texts)
    for name, part in seen.items():
        assert part == [text for text in texts if text in set(part)], name
        assert not any(set(part) & set(other) for key, other in seen.items() if key != name)
    assert 0.8 < len(seen["train"]) / len(texts) < 0.98 and seen["validation"] and seen["test"]


def test_a_parquet_table_is_its_rows(table: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [json.loads(line)["body"] for line in table.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "columns").mkdir()
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "columns" / "rows.parquet", row_group_size=50)
    for data, name in ((table, "lines"), (tmp_path / "columns", "rows")):
        pack(Packing(data=str(data), text_field="body", shard_bytes=4000), tmp_path / name, 1, silent)
    for name in PACKED_SPLITS:
        left, right = (open_corpus(str(tmp_path / place)).splits[name] for place in ("lines", "rows"))
        assert ids(left) == ids(right) and left.documents.tolist() == right.documents.tolist()
    with pytest.raises(KinformerError, match="does not have the column 'text'"):
        kinformer.pack(tmp_path / "columns", tmp_path / "none", workers=1)
    (tmp_path / "columns" / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(KinformerError, match="not a readable Parquet table"):
        kinformer.pack(tmp_path / "columns", tmp_path / "none2", workers=1)


def test_a_dataset_of_hugging_face_is_its_rows(table: Path, tmp_path: Path) -> None:
    """As ``Dataset.save_to_disk`` writes it: Arrow streams beside files about them."""
    pyarrow = pytest.importorskip("pyarrow")
    texts = [json.loads(line)["body"] for line in table.read_text(encoding="utf-8").splitlines()]
    saved, half = tmp_path / "saved", len(texts) // 2
    saved.mkdir()
    for name in ("dataset_info.json", "state.json"):
        (saved / name).write_text("{}")
    for number, part in enumerate((texts[:half], texts[half:])):
        rows = pyarrow.table({"other": list(range(len(part))), "body": part})
        with pyarrow.ipc.new_stream(str(saved / f"data-{number:05d}-of-00002.arrow"), rows.schema) as stream:
            stream.write_table(rows, max_chunksize=20)
    for data, name in ((table, "lines"), (saved, "rows")):
        pack(Packing(data=str(data), text_field="body", shard_bytes=4000), tmp_path / name, 1, silent)
    for name in PACKED_SPLITS:
        left, right = (open_corpus(str(tmp_path / place)).splits[name] for place in ("lines", "rows"))
        assert ids(left) == ids(right) and left.documents.tolist() == right.documents.tolist()
    with pytest.raises(KinformerError, match="does not have the column 'text'"):
        kinformer.pack(saved, tmp_path / "none", workers=1)
    (saved / "data-00000-of-00002.arrow").write_bytes(b"no stream at all")
    with pytest.raises(KinformerError, match="not a readable Arrow stream"):
        kinformer.pack(saved, tmp_path / "none2", workers=1)


def test_what_was_interrupted_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Packing(data=str(folder), shard_bytes=700)
    pack(wanted, tmp_path / "whole", 1, silent)
    pieces, write = [], packing.pack_piece

    def interrupted(out: Path, number: int, *rest: object) -> None:
        if len(pieces) == 3:
            raise KeyboardInterrupt
        pieces.append(number)
        write(out, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "pack_piece", interrupted)
        pack(wanted, tmp_path / "shards", 1, silent)
    with pytest.raises(KinformerError, match="is unfinished"):
        open_corpus(str(tmp_path / "shards"))
    with pytest.raises(KinformerError, match="other data or other options"):
        pack(replace(wanted, shard_bytes=800), tmp_path / "shards", 1, silent)
    again = []
    monkeypatch.setattr(
        packing, "pack_piece", lambda out, number, *rest: (again.append(number), write(out, number, *rest))
    )
    pack(wanted, tmp_path / "shards", 1, silent)
    assert pieces == [0, 1, 2] and again[0] == 3
    assert contents(tmp_path / "shards") == contents(tmp_path / "whole")
    with pytest.raises(KinformerError, match="holds packed data already"):
        pack(wanted, tmp_path / "shards", 1, silent)


def test_two_processes_pack_as_one(folder: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        pack(Packing(data=str(folder), shard_bytes=2000), tmp_path / str(workers), workers, silent)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize("damage", [{"files": None}, {"splits": []}, {"splits": {"train": {}}}, {"place": 3}])
def test_a_damaged_record_is_packed_again(folder: Path, tmp_path: Path, monkeypatch, damage: dict) -> None:
    wanted, write_json = Packing(data=str(folder), shard_bytes=2000), packing.write_json
    pack(wanted, tmp_path / "whole", 1, silent)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "_finish", interrupt)
        pack(wanted, tmp_path / "shards", 1, silent)
    path = packing.record_path(tmp_path / "shards", 0)
    record = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    write_json(path, signed(record | damage))
    pack(wanted, tmp_path / "shards", 1, silent)
    assert contents(tmp_path / "shards") == contents(tmp_path / "whole")


@pytest.mark.parametrize("documents", [False, True])
def test_a_packer_that_is_killed_loses_and_leaves_nothing(folder: Path, tmp_path: Path, documents: bool) -> None:
    """Killed before each change of a file's name and each removal, then started again at once."""
    data = ["one two three " * 60, "four five " * 90, "six " * 200] if documents else folder

    def packed(out: Path) -> None:
        if documents:
            pack_stream(Packing(data="a list", shard_bytes=900), documents_of(data), out, silent)
        else:
            pack(Packing(data=str(folder), shard_bytes=8000), out, 1, silent)

    packed(tmp_path / "whole")
    for number in itertools.count(0, 3):
        out = tmp_path / str(number)
        if not (child := os.fork()):
            kill_at(number)
            packed(out)
            os._exit(0)
        killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        if killed:
            packed(out)
        assert contents(out) == contents(tmp_path / "whole"), number
        if not killed:
            break
    assert number > 10


def kill_at(number: int) -> None:
    """Kill this process before its call ``number`` that renames or removes a file."""
    calls = itertools.count()

    def killing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    os.replace, Path.replace, Path.unlink = killing(os.replace), killing(Path.replace), killing(Path.unlink)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_script_without_a_main_guard_is_told(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import kinformer\nkinformer.pack({str(folder)!r}, 'out', shard_mb=1, workers=2)\n")
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1 and "outside of `if __name__" in last and done.stderr.count("Traceback") == 1


def test_packing_leaves_the_environment_of_the_caller(folder: Path, tmp_path: Path) -> None:
    before = dict(os.environ)
    for workers in (1, 2):
        kinformer.pack(folder, tmp_path / str(workers), workers=workers)
    assert dict(os.environ) == before


def test_training_on_shards_is_training_on_their_text(folder: Path, tmp_path: Path) -> None:
    pack(Packing(data=str(folder), shard_bytes=900), tmp_path / "shards", 1, silent)
    options = "--recipe tiny --length 16 --batch-size 4 --validation-tokens 64 --device cpu --set training.log_every=1"
    for name, data in (("text", folder), ("ids", tmp_path / "shards")):
        out = str(tmp_path / name)
        assert main(["train", "gpt", *options.split(), "--steps", "4", "--data", str(data), "--out", out]) == 0
    assert curve(tmp_path / "text") == curve(tmp_path / "ids")
    assert kinformer.evaluate(tmp_path / "ids", max_bytes=99).data["same_as_run"]
    assert main(["train", "gpt", "--resume", "--steps", "6", "--out", str(tmp_path / "ids")]) == 0


def test_rows_that_begin_anew_at_every_document(folder: Path) -> None:
    corpus = open_corpus(str(folder), holdout=0.4)
    rows = NextTokens(corpus, replace(SETTINGS, length=300, validation_tokens=10**6), reset_documents=True)
    marked = 0
    for step in range(5):
        batch, starts = rows.batch(step, 0, 1), rows.sampler.starts(step)
        expected = corpus.splits["train"].document_starts(starts, 300)
        assert np.array_equal(batch.reset if batch.reset is not None else np.zeros_like(expected), expected)
        marked += int(expected.sum())
    assert marked and any(batch.reset[:, 1:].any() for batch in rows.validation(0, 1) if batch.reset is not None)
    with pytest.raises(KinformerError, match="leave one out"):
        kinformer.train("gpt", data=folder, out=folder / "run", segments=True, reset_documents=True)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "table", "manifest", "resigned"])
def test_damaged_shards_are_one_sentence(folder: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "shards"
    pack(Packing(data=str(folder)), out, 1, silent)
    shard = next(out.glob("train-*.ids"))
    data = shard.read_bytes()
    if damage == "truncate":
        shard.write_bytes(data[:-1])
    elif damage == "flip":
        shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "remove":
        shard.unlink()
    elif damage == "table":
        (out / "train.documents.npy").write_bytes((out / "train.documents.npy").read_bytes()[:-8])
    elif damage == "manifest":
        (out / MANIFEST).write_text((out / MANIFEST).read_text().replace('"width": 1', '"width": 2'))
    else:
        manifest = json.loads((out / MANIFEST).read_text())
        manifest.pop("checksum")
        manifest["splits"]["train"]["shards"][0]["file"] = "../../etc/passwd"
        (out / MANIFEST).write_text(json.dumps(signed(manifest)))
    for use in (lambda: open_packed(out, ByteTokenizer()), lambda: kinformer.check_shards(out)):
        with pytest.raises(KinformerError) as refused:
            use()
        assert "\n" not in str(refused.value) and str(out) in str(refused.value)


def test_mistakes(folder: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(table, tmp_path / "mixed.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    shutil.copytree(folder, tmp_path / "both")
    shutil.copy(table, tmp_path / "both")
    for words, told in (
        ([str(tmp_path / "none"), "--out", "x"], "does not exist"),
        ([str(folder)], "--out"),
        ([str(folder), "--out", str(tmp_path / "full")], "is not empty"),
        ([str(folder), "--out", str(tmp_path / "x"), "--text-field", "text"], "JSON lines"),
        ([str(folder), "--out", str(tmp_path / "x"), "--shard-mb", "0"], "--shard-mb"),
        ([str(folder), "--out", str(tmp_path / "x"), "--tokenizer", str(tmp_path / "none")], "the file does not exist"),
        ([str(table), "--out", str(tmp_path / "y")], "does not have text in the field 'text'"),
        ([str(tmp_path / "broken.jsonl"), "--out", str(tmp_path / "z")], "line at byte 14"),
        ([str(tmp_path / "both"), "--out", str(tmp_path / "w")], "is not a table"),
        ([str(folder), "--check"], "the file does not exist"),
    ):
        assert main(["pack", *words, *([] if "--check" in words else ["--workers", "1"])]) == 2, words
        told_here = capsys.readouterr().err
        assert told in told_here and told_here.count("\n") == 1, told_here
    pack(Packing(data=str(folder)), tmp_path / "shards", 1, silent)
    with pytest.raises(KinformerError, match="was chosen when it was packed"):
        open_corpus(str(tmp_path / "shards"), holdout=0.1)


def test_shards_without_their_manifest_are_not_learnt_as_bytes(folder: Path, tmp_path: Path) -> None:
    pack(Packing(data=str(folder)), tmp_path / "shards", 1, silent)
    (tmp_path / "shards" / MANIFEST).unlink()
    with pytest.raises(KinformerError, match="shards: holds token shards such as .*.ids but not their manifest.json"):
        open_corpus(str(tmp_path / "shards"))
