from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kinformer.lab.data import Labelled, labelled, open_labelled
from kinformer.lab.data.labelled import Columns, cells_of, read_texts
from kinformer.lab.data.tokenizer import ByteTokenizer
from kinformer.runtime.errors import KinformerError

TEXTS = [
    (f"{'a good' if index % 2 else 'a bad'} film, number {index}", ("bad", "good")[index % 2]) for index in range(60)
]


def pairs(data: Labelled, split: str) -> set[tuple[str, str]]:
    part = data.splits[split]
    return {(bytes(part.tokens(index)).decode(), data.classes[part.labels[index]]) for index in range(len(part))}


def everything(data: Labelled) -> list[tuple[str, str]]:
    return sorted(pair for split in data.splits for pair in pairs(data, split))


def in_folders(folder: Path, texts: list[tuple[str, str]]) -> Path:
    for index, (text, label) in enumerate(texts):
        path = folder / label / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def as_table(path: Path, texts: list[tuple[str, str]], header: str = "", turned: bool = False) -> Path:
    lines = [f"{text}\t{label}" if turned else f"{label}\t{text}" for text, label in texts]
    path.write_text("\n".join([header] * bool(header) + lines) + "\n")
    return path


def as_objects(path: Path, texts: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "label": label, "id": 1}) + "\n" for text, label in texts))
    return path


def test_the_same_examples_whatever_their_form(tmp_path: Path) -> None:
    forms = [
        in_folders(tmp_path / "films", TEXTS),
        as_table(tmp_path / "films.tsv", TEXTS),
        as_table(tmp_path / "named.tsv", TEXTS, "sentence\tlabel", turned=True),
        as_objects(tmp_path / "films.jsonl", TEXTS),
    ]
    opened = [open_labelled(str(form), cache=tmp_path / "cache") for form in forms]
    for data in opened:
        assert data.classes == ("bad", "good") and data.vocab_size == 256
        assert {name: len(split) for name, split in data.splits.items()} == {"train": 54, "validation": 3, "test": 3}
        assert everything(data) == sorted(TEXTS)
        assert pairs(data, "test") == pairs(opened[0], "test")
        assert isinstance(data.splits["train"].ids, np.memmap)


def test_splits_that_are_given(tmp_path: Path) -> None:
    for name, texts in (("train", TEXTS[:40]), ("test", TEXTS[40:])):
        in_folders(tmp_path / "films" / name, texts)
    data = open_labelled(str(tmp_path / "films"), cache=tmp_path / "cache")
    assert pairs(data, "test") == set(TEXTS[40:])
    assert pairs(data, "train") | pairs(data, "validation") == set(TEXTS[:40]) and len(data.splits["validation"]) == 2
    tables = tmp_path / "tables"
    tables.mkdir()
    as_table(tables / "train.tsv", TEXTS[:30])
    as_table(tables / "dev.tsv", TEXTS[30:40])
    as_objects(tables / "test.jsonl", TEXTS[40:])
    data = open_labelled(str(tables), cache=tmp_path / "cache")
    assert [pairs(data, name) for name in ("train", "validation", "test")] == [
        set(TEXTS[:30]),
        set(TEXTS[30:40]),
        set(TEXTS[40:]),
    ]


def test_one_share_held_out(tmp_path: Path) -> None:
    data = open_labelled(str(as_table(tmp_path / "films.tsv", TEXTS)), cache=tmp_path / "cache", holdout=0.25)
    assert pairs(data, "validation") == pairs(data, "test") and len(data.splits["test"]) == 15
    assert len(data.splits["train"]) == 45


def test_classes_are_numbered_by_number(tmp_path: Path) -> None:
    texts = [(f"text {index}", str(index % 11)) for index in range(110)]
    assert open_labelled(str(as_objects(tmp_path / "n.jsonl", texts)), cache=tmp_path / "cache").classes == tuple(
        map(str, range(11))
    )


def test_written_once_and_anew_when_the_data_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_table(tmp_path / "films.tsv", TEXTS)
    first = open_labelled(str(path), cache=tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(labelled, "_split_examples", None)
        again = open_labelled(str(path), cache=tmp_path / "cache")
    assert everything(again) == everything(first) and again.fingerprint == first.fingerprint
    as_table(path, [*TEXTS, ("one more", "good")])
    changed = open_labelled(str(path), cache=tmp_path / "cache")
    assert changed.fingerprint != first.fingerprint and sum(map(len, changed.splits.values())) == 61
    assert not list((tmp_path / "cache" / "labelled").glob(".*"))
    for damaged in (tmp_path / "cache" / "labelled").glob("*/train.ids.npy"):
        damaged.write_bytes(b"nothing")
    with pytest.raises(KinformerError, match="is damaged"):
        open_labelled(str(path), cache=tmp_path / "cache")


def test_long_texts_are_not_encoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
            sizes.append(sum(map(len, texts)))
            return super().encode_batch(texts)

    monkeypatch.setattr(labelled, "_BATCH", 1000)
    long = [(f"{number} " + "word " * 120, label) for number, (_, label) in enumerate(TEXTS)]
    data = open_labelled(str(in_folders(tmp_path / "long", long)), cache=tmp_path / "cache", tokenizer=Counting())
    assert max(sizes) < 1000 + 700 and len(sizes) > 20
    assert everything(data) == sorted(long)


def test_ids_of_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from kinformer.lab.data import open_corpus, train_tokenizer

    words = tmp_path / "words.txt"
    words.write_text(" ".join(text for text, _ in TEXTS))
    tokenizer = train_tokenizer(open_corpus(str(words)).splits["train"], 300, tmp_path / "tokenizer.json")
    data = open_labelled(str(as_table(tmp_path / "films.tsv", TEXTS)), cache=tmp_path / "cache", tokenizer=tokenizer)
    train = data.splits["train"]
    assert train.ids.dtype == np.uint16 and data.vocab_size == tokenizer.vocab_size
    told = {tokenizer.decode(train.tokens(index)) for index in range(len(train))}
    assert told <= {text for text, _ in TEXTS} and train.lengths.mean() < 15


def files(folder: Path, **contents: str) -> str:
    folder.mkdir()
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(folder)


@pytest.mark.parametrize(
    ("contents", "name", "told"),
    [
        ({}, "nothing", "does not exist"),
        ({"a_txt": "text"}, "", "stands in no class's folder"),
        ({f"good__{index}": "text" for index in range(5)}, "", "all examples have the label 'good'"),
        ({"train__good__1": "a", "bad__1": "b"}, "", "holds classes beside the splits train"),
        ({"test__good__1": "a"}, "", "does not hold a train split"),
        ({"good__1": "a", "bad__1": "b"}, "", "too few examples"),
        ({"a_xml": "x,y"}, "a.xml", "is not labelled data"),
        ({"a_tsv": "good\tfine\nbad"}, "a.tsv", "line 2: has 1 column where"),
        ({"a_tsv": "good\tfine\nbad\t"}, "a.tsv", "line 2: its text is empty"),
        ({"a_tsv": "good\tfine\n\tpoor"}, "a.tsv", "line 2: its label is empty"),
        ({"a_jsonl": '{"text": "a", "label": "b"}\n{'}, "a.jsonl", "line 2: is not JSON"),
        ({"a_jsonl": '{"text": "a"}'}, "a.jsonl", "line 1: lacks text or label"),
        ({"a_jsonl": "[1]"}, "a.jsonl", "line 1: lacks text or label"),
        ({"a_jsonl": ""}, "a.jsonl", "is empty"),
    ],
)
def test_what_is_no_labelled_data(tmp_path: Path, contents: dict[str, str], name: str, told: str) -> None:
    folder = files(tmp_path / "data", **contents)
    with pytest.raises(KinformerError, match=told) as error:
        open_labelled(str(Path(folder) / name), cache=tmp_path / "cache")
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_memory_is_about_that_of_the_file(tmp_path: Path) -> None:
    """Not many times as much, as an object for every text takes."""
    path = tmp_path / "many.tsv"
    path.write_text("".join(f"{'good' if n % 3 else 'bad'}\t{n:09} {'fine ' * 140}\n" for n in range(5000)))
    open_labelled(str(as_table(tmp_path / "films.tsv", TEXTS)), cache=tmp_path / "cache")  # what is imported meanwhile
    tracemalloc.start()
    data = open_labelled(str(path), cache=tmp_path / "cache")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * path.stat().st_size
    assert sum(map(len, data.splits.values())) == 5000


FILMS = TEXTS[:40]


def csv_of(path: Path, header: str, rows: list[tuple[str, str]]) -> str:
    with path.open("w", newline="") as file:
        file.write(header)
        csv.writer(file).writerows(rows)
    return str(path)


@pytest.mark.parametrize("header", ["sentence,author\n", "\ufefftext,author\n", "review,label\n"])
def test_one_usual_name_is_enough_in_a_table_of_two_columns(tmp_path: Path, header: str) -> None:
    data = open_labelled(csv_of(tmp_path / "a.csv", header, FILMS), cache=tmp_path / "cache")
    assert everything(data) == sorted(FILMS)
    assert data.columns == "the label is its column {1!r}, the text {0!r}".format(*header.strip("\ufeff\n").split(","))


def test_a_header_of_other_names_is_not_a_row(tmp_path: Path, notes: pytest.LogCaptureFixture) -> None:
    turned = [(label, text) for text, label in FILMS]
    data = open_labelled(csv_of(tmp_path / "a.csv", "author,document\n", turned), cache=tmp_path / "cache")
    assert everything(data) == sorted(FILMS)
    assert "line 1: is taken for the names of the columns, a label 'author' and a text 'document'" in notes.text
    data = open_labelled(csv_of(tmp_path / "b.csv", "", turned), cache=tmp_path / "cache")
    assert everything(data) == sorted(FILMS) and data.columns == "label and text are its first two columns"


@pytest.mark.parametrize("header", ["document,author\n", ""])
def test_swapped_columns_are_refused(tmp_path: Path, header: str) -> None:
    path = csv_of(tmp_path / "a.csv", header, FILMS)
    with pytest.raises(KinformerError, match="line 1: the second of two columns repeats its values, as labels do"):
        open_labelled(path, cache=tmp_path / "cache")
    with pytest.raises(KinformerError, match="line 1: the second of two columns repeats"):
        read_texts(path, Columns())


def test_a_mark_at_the_beginning_is_no_part_of_a_label(tmp_path: Path) -> None:
    path = as_table(tmp_path / "films.tsv", TEXTS)
    path.write_text("\ufeff" + path.read_text())
    assert open_labelled(str(path), cache=tmp_path / "cache").classes == ("bad", "good")
    path.write_text("".join(f"{label}\t{text}\n" for text, label in TEXTS), encoding="utf-16")
    assert open_labelled(str(path), cache=tmp_path / "cache").classes == ("bad", "good")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".txt"])
def test_texts_in_the_encodings_of_spreadsheets(tmp_path: Path, encoding: str, ending: str) -> None:
    texts = ["na\u00efve \u2028 one", "\U0001f642 \u0a0d\u0d0a two"]
    path = tmp_path / f"texts{ending}"
    rows = [json.dumps({"text": text}) if ending == ".jsonl" else text for text in texts]
    rows = rows if ending in (".jsonl", ".txt") else ["text", *rows]
    path.write_bytes("".join(f"{row}\r\n" for row in rows).encode(encoding))
    assert [item.text for item in read_texts(path, Columns()).items] == texts
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_bytes(texts[0].encode(encoding))
    assert [item.text for item in read_texts(tmp_path / "folder", Columns()).items] == texts[:1]


def test_utf16_that_is_cut_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cut.tsv").write_bytes("one\ttwo\n".encode("utf-16")[:-1])
    with pytest.raises(KinformerError, match="begins as UTF-16 but is not"):
        list(read_texts(tmp_path / "cut.tsv", Columns()).items)


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ('a\t"b\tc"', ["a", "b\tc"]),
        ('"say ""hi"" to her"\tb', ['say "hi" to her', "b"]),
        ('"a"\t"b"', ["a", "b"]),
        ('"Hello," he said.\tb', ['"Hello," he said.', "b"]),
        ('"Hello."\tb', ['"Hello."', "b"]),
        ('"open\tb', ['"open', "b"]),
        ('a "b" c\t', ['a "b" c', ""]),
    ],
)
def test_quotes_of_tsv_are_text_unless_they_quote(line: str, cells: list[str]) -> None:
    assert cells_of(line.encode()) == [cell.encode() for cell in cells]


def test_what_people_have(tmp_path: Path) -> None:
    """Blank last lines, cells of documents, labels as pandas writes them, and a folder ``val``."""
    tables = tmp_path / "tables"
    (tables).mkdir()
    long = [(f"{text} {'word ' * 30_000}", label) for text, label in TEXTS[:4]]
    csv_of(tables / "train.csv", "text,label\n", long)
    as_table(tables / "val.tsv", TEXTS[4:10], header="label\ttext").write_text((tables / "val.tsv").read_text() + "\n")
    as_objects(tables / "test.jsonl", TEXTS[10:20]).write_text((tables / "test.jsonl").read_text() + "\n")
    data = open_labelled(str(tables), cache=tmp_path / "cache")
    assert [pairs(data, name) for name in ("train", "validation", "test")] == [
        {(text, label) for text, label in long},
        set(TEXTS[4:10]),
        set(TEXTS[10:20]),
    ]
    (tmp_path / "n.jsonl").write_text(
        "".join(json.dumps({"text": f"t{n}", "label": n % 2 * 1.0}) + "\n" for n in range(30))
    )
    assert open_labelled(str(tmp_path / "n.jsonl"), cache=tmp_path / "cache").classes == ("0", "1")
    (tmp_path / "n.jsonl").write_text(
        (tmp_path / "n.jsonl").read_text().replace('"t7", "label": 1.0', '"t7", "label": NaN')
    )
    with pytest.raises(KinformerError, match="line 8: lacks text or label"):
        open_labelled(str(tmp_path / "n.jsonl"), cache=tmp_path / "cache")


def test_the_share_of_examples_that_are_cut(tmp_path: Path) -> None:
    data = open_labelled(str(as_table(tmp_path / "films.tsv", TEXTS)), cache=tmp_path / "cache", holdout=0.5)
    longest = max(len(text) for text, _ in TEXTS)
    assert data.cut("train", longest) == ""
    share = (data.splits["train"].lengths > longest - 1).mean()
    told = (
        f"{share:.1%} of the train examples of films.tsv have more than {longest - 1} tokens, {longest} tokens at most"
    )
    assert data.cut("train", longest - 1).startswith(told)
