"""Data that is packed, a table, UTF-16 or JSON lines is told as that; other bytes are data."""

import bz2
import gzip
import json
import lzma

import pytest

import kinformer
from kinformer.data import open_corpus
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
        (TEXT.encode("utf-16"), "is UTF-16 text"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is UTF-16 text"),
        (ROWS.encode(), "is JSON lines with the fields id, text, n; train on one of them with --text-field NAME"),
        (b'{"text": "only one"}\n', "is JSON lines with the fields text;"),
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


def test_a_field_of_json_lines_is_trained_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    small = {"recipe": "tiny", "steps": 1, "length": 16, "batch_size": 2, "validation_tokens": 64, "device": "cpu"}
    run = kinformer.train("gpt", data=path, text_field="text", out=tmp_path / "run", **small)
    written = (tmp_path / "run" / "texts").read_text()
    assert written.splitlines() == [json.loads(row)["text"] for row in ROWS.splitlines()]
    assert kinformer.evaluate(run.folder, max_bytes=99).data["same_as_run"]
    again = kinformer.train("gpt", data=path, text_field="text", out=run.folder, resume=True, steps=2)
    assert again.training["steps"] == 2
    for wrong, told in (
        ({"text_field": "txt", "data": path}, "line 1: has no text in the field 'txt'; did you mean 'text'"),
        ({"text_field": "n", "data": path}, "has no text in the field 'n'"),
        ({"text_field": "text"}, "give its path with --data"),
        ({"text_field": "text", "data": path, "task": "classify"}, "--text-field text: is for tasks of text"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.train("bert" if "task" in wrong else "gpt", out=tmp_path / "other", **wrong, **small)
        assert not (tmp_path / "other").exists()
