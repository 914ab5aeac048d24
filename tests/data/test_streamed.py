"""Packing of documents that are streamed: datasets of Hugging Face, and anything that can be read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.data.packed import Packed
from kinformer.lab.data.packing import Documents, Packing, documents_of, pack_stream
from kinformer.runtime.errors import KinformerError

ROWS = [{"body": f"document {number} " + "of the wind " * (number % 7)} for number in range(200)]


class Again:
    """Rows that can be read again, and how many were."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            self.read += 1
            yield row


class Coded:
    """Rows whose files need a package that is missing."""

    def __iter__(self) -> Iterator[Any]:
        yield from map(import_module, ["a_missing_codec"])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    for part in range(4):
        lines = [json.dumps(row) + "\n" for row in ROWS[50 * part : 50 * part + 50]]
        (folder / f"part-{part}.jsonl").write_text("".join(lines))
    return folder


def streamed(documents: Documents, out: Path, until: int = 0) -> dict[str, bytes]:
    def progress(done: int, total: int) -> None:
        if done == until:
            raise KeyboardInterrupt

    packing = Packing(data=documents.name, text_field="body", shard_bytes=1500)
    pack_stream(packing, documents, out, progress)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def ids(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def killed_and_again(open_data: Any, tmp_path: Path) -> dict[str, bytes]:
    """The shards of a call that was interrupted behind its third piece and given again, which are those of one call."""
    whole = streamed(documents(open_data()), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        streamed(documents(open_data()), tmp_path / "parts", until=3)
    assert streamed(documents(open_data()), tmp_path / "parts") == whole
    return whole


def documents(data: Any) -> Documents:
    made = documents_of(data)
    assert made is not None
    return made


def test_what_was_interrupted_goes_on_behind_the_documents_that_are_packed(tmp_path: Path) -> None:
    whole = killed_and_again(lambda: Again(ROWS), tmp_path)
    assert len([name for name in whole if name.endswith(".ids")]) > 8


def test_a_stream_of_hugging_face_goes_on_by_its_state(table: Path, tmp_path: Path, monkeypatch: Any) -> None:
    datasets = pytest.importorskip("datasets")
    files = sorted(map(str, table.iterdir()))

    def opened() -> Any:
        return datasets.load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
        )

    monkeypatch.setattr(datasets.IterableDataset, "skip", None)  # nothing is read again
    killed_and_again(opened, tmp_path)
    streamed(documents(ROWS), tmp_path / "rows")
    assert ids(tmp_path / "rows") == ids(tmp_path / "parts")


def test_the_command_streams_a_dataset(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    words = ["pack", f"hf:{table}:train", "--out", str(tmp_path / "shards"), "--text-field", "body", "--json"]
    assert main(words) == 0
    capsys.readouterr()
    kinformer.pack(ROWS, tmp_path / "rows", text_field="body")
    assert ids(tmp_path / "rows") == ids(tmp_path / "shards")
    for place, told in (
        (f"hf:{table}:none", "cannot be read"),
        ("hf:", "is not a name of a dataset"),
        ("hf:a:b:c:d", "is not a name of a dataset"),
        (f"hf:{table}:train", "does not have text in the field 'text'; valid names are body"),
    ):
        assert main(["pack", place, "--out", str(tmp_path / "other")]) == 2
        told_here = capsys.readouterr().err
        assert told in told_here and told_here.count("\n") == 1, told_here
    assert main([*words[:3], str(tmp_path / "third"), *words[4:6], "--workers", "2"]) == 2
    assert "one process reads a stream" in capsys.readouterr().err


def test_streams_that_cannot_be_packed(tmp_path: Path) -> None:
    for data, told in (
        ((row for row in ROWS), "the generator cannot be read a second time"),
        ({"train": ROWS, "test": ROWS}, "the dict has several splits .train, test.; give one"),
        ([3], "document 1: does not have text in the field 'text'"),
        ([], "the list: does not hold text to train on"),
        (Coded(), "the Coded: cannot be read .ModuleNotFoundError: No module named .a_missing_codec"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.pack(data, tmp_path / "out")
    packed = kinformer.pack([f"text {number}" for number in range(40)], tmp_path / "texts")
    assert isinstance(packed, Packed) and packed.tokens["train"] > 200
    with pytest.raises(KinformerError, match="holds packed data already"):
        kinformer.pack(["text"], tmp_path / "texts")


def test_another_stream_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        streamed(documents(Again(ROWS)), tmp_path / "parts", until=2)
    with pytest.raises(KinformerError, match="holds shards of other data or other options"):
        streamed(documents(Again(ROWS[1:])), tmp_path / "parts")
