"""Data that is packed, a table, UTF-16 or JSON lines is told as that; other bytes are data."""

import bz2
import gzip
import json
import lzma

import pytest

import kinformer
from kinformer.lab.data import open_corpus
from kinformer.runtime.errors import KinformerError

TEXT = "the wind sings under the river\n" * 200
ROWS = "".join(
    json.dumps({"id": n, "text": f"line {n} of the wind and the river", "n": None}) + "\n" for n in range(300)
)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (gzip.compress(TEXT.encode(), mtime=0), "is gzip-compressed; unpack it first, as with gunzip -k."),
        (bz2.compress(TEXT.encode()), "is bzip2-compressed"),
        (lzma.compress(TEXT.encode()), "is xz-compressed"),
        (b"PK\x03\x04" + bytes(range(256)), "is a ZIP archive"),
        (b"PAR1\x15\x04" + bytes(range(256)), "is a Parquet table"),
        (
            b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" * 9,
            "is a PDF; write its text into a text file",
        ),
        (b"%PDF-1.4\n1 0 obj\n", "is a PDF"),
        (b"SQLite format 3\0" + bytes(500), "is an SQLite database"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(99), "is a 7z archive"),
        (b"ARROW1\0\0" + bytes(99), "is an Arrow table"),
        (bytes(257) + b"ustar\x0000" + bytes(999), "is a tar archive"),
        (TEXT.encode("utf-16"), "is UTF-16 text"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is UTF-16 text"),
        ("short".encode("utf-16") + b"\n", "is UTF-16 text"),
        (ROWS.encode(), "is JSON lines with the fields id, text, n; train on one field with text_field NAME"),
        (b'{"text": "only one"}\n', "is JSON lines with the fields text;"),
        (
            json.dumps([{"id": n, "text": TEXT} for n in range(30)]).encode(),
            "is an array of JSON objects with the fields id, text; train on one field with text_field NAME",
        ),
        (b' [\n {"a": 1, "b": ' + b"9" * 30 + b"},\n", "is an array of JSON objects with the fields a, b;"),
    ],
)
def test_what_is_neither_text_nor_bytes_is_told(tmp_path, data, told):
    path = tmp_path / "data"
    path.write_bytes(data)
    with pytest.raises(KinformerError) as raised:
        open_corpus(str(path))
    assert told in str(raised.value) and str(raised.value).startswith(str(path))


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        bytes(range(256)) * 20,
        b"BZhang wrote a letter.\n" * 50,
        b"PAR1 is a word.\n" * 50,
        b"\xff\xfe\x00\xd8\x00\xd8" * 99,
        json.dumps({"a": {"b": [1, 2]}}, indent=1).encode() * 20,
        b'{"a": 1}\nno json\n' * 50,
        b"[1, 2]\n" * 99,
        "ünïcödé €\n".encode() * 9000,
    ],
)
def test_text_and_other_bytes_are_data(tmp_path, data):
    path = tmp_path / "data"
    path.write_bytes(data)
    assert sum(split.bytes for split in open_corpus(str(path)).splits.values()) == len(data)


def test_bytes_that_are_no_text_are_told(tmp_path, caplog):
    caplog.set_level("INFO")
    for data, what in ((b"\x89PNG\r\n\x1a\n" + bytes(99), "a PNG picture"), (bytes(range(256)), "no text")):
        path = tmp_path / what[-4:]
        path.write_bytes(data)
        open_corpus(str(path))
        assert caplog.messages[-1] == f"note: {path}: looks like {what} and is learnt byte by byte, unchanged."


def test_a_folder_of_tables_is_refused_and_one_with_few_is_not(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.parquet").write_bytes(b"PAR1\x15\x04" + bytes(99))
    open_corpus(str(tmp_path))
    assert "1 of 2 files are packed or no text (b.parquet is a Parquet table)" in caplog.messages[-1]
    (tmp_path / "b.parquet").write_bytes(b"PAR1\x15\x04" + bytes(99_999))
    with pytest.raises(KinformerError, match=f"{tmp_path}: b.parquet is a Parquet table; write its column of text"):
        open_corpus(str(tmp_path))


def test_a_field_of_json_lines_is_trained_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    small = {"recipe": "tiny", "steps": 1, "length": 16, "batch_size": 2, "validation_tokens": 64, "device": "cpu"}
    run = kinformer.train("gpt", data=path, text_field="text", out=tmp_path / "run", **small)
    written = (tmp_path / "run" / "texts").read_text()
    assert written.splitlines() == [json.loads(row)["text"] for row in ROWS.splitlines()]
    assert kinformer.evaluate(run.folder, first=99).data["same_as_run"]
    again = kinformer.train("gpt", data=path, text_field="text", out=run.folder, resume=True, steps=2)
    assert again.training["steps"] == 2
    (tmp_path / "rows.json").write_text(json.dumps([json.loads(row) for row in ROWS.splitlines()], indent=1))
    kinformer.train("gpt", data=tmp_path / "rows.json", text_field="text", out=tmp_path / "array", **small)
    assert (tmp_path / "array" / "texts").read_text() == written
    for wrong, told in (
        ({"text_field": "txt", "data": path}, "line 1: does not have text in the field 'txt'; did you mean 'text'"),
        ({"text_field": "n", "data": path}, "does not have text in the field 'n'"),
        ({"text_field": "text"}, "give their path with data"),
        (
            {"text_field": "text", "data": path, "task": "classify"},
            "line 1: lacks a label; name its field with label_field",
        ),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.train("bert" if "task" in wrong else "gpt", out=tmp_path / "other", **wrong, **small)
        assert not (tmp_path / "other").exists()
