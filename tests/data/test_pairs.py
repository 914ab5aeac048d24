"""Pairs of lines from files of every form, what is wrong with them, and batches of them by tokens."""

import gzip
import json

import numpy as np
import pytest

from kinformer.lab.data.buckets import TokenBatches
from kinformer.lab.data.pairs import Languages, english, german, open_pairs
from kinformer.runtime.errors import KinformerError

ENGLISH = [f"line {index}" for index in range(40)]
GERMAN = [f"Zeile {index}" for index in range(40)]


def write(folder, **files):
    """Files of lines by name, ``__`` for a dot; packed where they end on gz."""
    for name, lines in files.items():
        data = ("\n".join(lines) + "\n").encode()
        path = folder / name.replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return folder


def lines(pairs):
    return [(source.decode(), target.decode()) for source, target in zip(*pairs, strict=True)]


def test_a_folder_of_parts(tmp_path):
    parts = {"train__en": ENGLISH, "train__de": GERMAN, "val__en__gz": ["a"], "val__de__gz": ["b"]}
    found = open_pairs(
        str(write(tmp_path, **parts, test_1__en=["c"], test_1__de=["d"], test_2__en=["e"], test_2__de=["f"]))
    )
    assert found.languages == ("en", "de") and lines(found.splits["train"])[3] in zip(ENGLISH, GERMAN, strict=True)
    assert lines(found.splits["validation"]) == [("a", "b")]
    assert lines(found.splits["test"]) == [("c", "d"), ("e", "f")] and lines(found.splits["test_2"]) == [("e", "f")]
    assert sorted(lines(found.splits["train"])) == sorted(zip(ENGLISH, GERMAN, strict=True))
    back = open_pairs(str(tmp_path), languages=Languages("de"))
    assert lines(back.splits["validation"]) == [("b", "a")] and back.fingerprint != found.fingerprint


def test_what_is_missing_is_held_out(tmp_path):
    write(tmp_path, corpus__en=ENGLISH, corpus__de=GERMAN)
    found = open_pairs(str(tmp_path / "corpus"))
    assert [len(found.splits[name].source) for name in ("train", "validation", "test")] == [36, 2, 2]
    every = sorted(pair for split in found.splits.values() for pair in lines(split))
    assert every == sorted(zip(ENGLISH, GERMAN, strict=True))
    half = open_pairs(str(tmp_path / "corpus"), holdout=0.5).splits
    assert half["validation"] == half["test"] and len(half["train"].source) == 20
    assert found.identity["name"] == "corpus (en to de)"


@pytest.mark.parametrize("header", ["", "en\tde\n", "source\ttarget\n"])
def test_a_table(tmp_path, header):
    place = tmp_path / "pairs.tsv"
    place.write_text(header + "".join(f"{a}\t{b}\n" for a, b in zip(ENGLISH, GERMAN, strict=True)))
    found = open_pairs(str(place), holdout=0.1)
    assert len(found.splits["train"].source) == 36 and lines(found.splits["train"])[0][0].startswith("line")
    assert found.languages == (("en", "de") if header.startswith("en") else ("source", "target"))
    if header.startswith("en"):
        back = open_pairs(str(place), languages=Languages("de", "en"))
        assert lines(back.splits["train"])[0][0].startswith("Zeile")


def test_two_short_words_are_a_pair_and_a_blank_last_line_is_none(tmp_path, notes):
    place = tmp_path / "words.tsv"
    place.write_text("no\tja\n" + "".join(f"{a}\t{b}\n" for a, b in zip(ENGLISH, GERMAN, strict=True)) + "\n")
    found = open_pairs(str(place))
    assert sum(len(part.source) for part in found.splits.values()) == 41 and found.languages == ("source", "target")
    assert f"{place}: its first line, no and ja, is taken for a pair of words; if these are languages" in notes.text
    back = open_pairs(str(place), languages=Languages("ja", "no"))
    assert sum(len(part.source) for part in back.splits.values()) == 40 and back.languages == ("ja", "no")


@pytest.mark.parametrize(
    ("header", "name", "languages"),
    [
        ("id,en,score,de", "pairs.csv", Languages()),
        ("id,EN,score,de", "pairs.csv", Languages("en", "de")),
        ("id\tEnglish\tscore\tfr", "pairs.tsv", Languages("english", "fr")),
        ("note\tsource\tid\ttarget", "pairs.tsv", Languages()),
    ],
)
def test_columns_are_taken_by_their_names(tmp_path, header, name, languages):
    place, comma = tmp_path / name, "," in header
    rows = [
        f'{n},"{a}, or",{n},"{b}\nhier"' if comma else f"{n}\t{a}\t{n}\t{b}"
        for n, (a, b) in enumerate(zip(ENGLISH, GERMAN, strict=True))
    ]
    place.write_text("\n".join([header, *rows]) + "\n")
    pairs = lines(open_pairs(str(place), languages=languages, holdout=0.1).splits["train"])
    assert len(pairs) == 36
    for source, target in pairs:
        assert source.startswith("line") and source.endswith(", or") == comma
        assert target.startswith("Zeile") and target.endswith(" hier") == comma


def test_the_usual_names_say_which_column_is_which(tmp_path):
    (tmp_path / "x.tsv").write_text("target\tsource\n" + "b\ta\n" * 30)
    assert lines(open_pairs(str(tmp_path / "x.tsv")).splits["train"])[0] == ("a", "b")


@pytest.mark.parametrize(
    ("row", "languages"),
    [
        (lambda a, b: {"source": a, "target": b, "note": "x"}, ("source", "target")),
        (lambda a, b: {"de": b, "en": a}, ("en", "de")),
        (lambda a, b: {"id": 3, "translation": {"de": b, "en": a}}, ("en", "de")),
    ],
)
def test_lines_of_json(tmp_path, row, languages):
    place = tmp_path / "pairs.jsonl"
    place.write_text("".join(json.dumps(row(*pair)) + "\n" for pair in zip(ENGLISH, GERMAN, strict=True)))
    found = open_pairs(str(place))
    assert found.languages == languages and lines(found.splits["train"])[0][1].startswith("Zeile")


def test_pairs_with_an_empty_side_are_left_out_and_told(tmp_path, notes):
    write(tmp_path, train__en=[*ENGLISH, "", "x"], train__de=[*GERMAN, "y", " "])
    for _ in range(2):
        assert len(open_pairs(str(tmp_path)).splits["train"].source) == 36
    assert len(notes.messages) == 1 and "train.en: 2 of 42 pairs have an empty side" in notes.messages[0]


def test_ends_of_lines_and_a_mark_at_the_beginning(tmp_path):
    (tmp_path / "train.en").write_bytes(b"\xef\xbb\xbfa\r\nb\x0bc\xe2\x80\xa8d\r\n" + b"e\r\n" * 20)
    (tmp_path / "train.de").write_bytes(b"A\nB" + b"\nE" * 20)
    found = [pair for split in open_pairs(str(tmp_path)).splits.values() for pair in lines(split)]
    assert ("a", "A") in found and ("b\x0bc\u2028d", "B") in found


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"train__en": ENGLISH}, "has files of one language only \\(en\\)"),
        ({"train__en": ENGLISH, "train__de": GERMAN[1:]}, "train.en has 40 lines but .*train.de has 39"),
        ({"train__en": ["a"], "train__de": ["b"], "val__en": ["c"]}, "val.en: the other side val.de is missing"),
        ({"a__en": ["a"], "a__de": ["b"], "a__fr": ["c"]}, "more than two endings \\(de, en, fr\\); say which"),
        ({"test__en": ["a"], "test__de": ["b"], "val__en": ["a"], "val__de": ["b"]}, "nothing to train on"),
        ({"train__en": ["a"], "train__de": ["b"]}, "too few pairs \\(1\\)"),
        ({"train__en": [""], "train__de": ["b"]}, "does not hold a pair of lines"),
        ({"x__tsv": ["a\tb", "c"]}, "x.tsv, line 2: has 1 column where 2 are expected"),
        ({"x__tsv": ["a\tb\tc"]}, "has 3 columns where 2 are expected, .* or say by source and target which"),
        ({"x__tsv": ["id\ten\tde", "1\ta"]}, "x.tsv, line 2: has 2 columns where 3 are expected; mend it"),
        ({"x__csv": ['"a",b', '"a"b,c']}, "x.csv, line 2: is not a row of CSV"),
        ({"x__jsonl": ['{"source": "a"}']}, "x.jsonl, line 1: lacks the text of source and target"),
        ({"x__jsonl": ['{"source": "a", "target": "b"}', "x"]}, "x.jsonl, line 2: is not JSON"),
        ({}, "does not hold a regular file"),
    ],
)
def test_mistakes(tmp_path, files, told):
    with pytest.raises(KinformerError, match=told):
        open_pairs(str(write(tmp_path, **files)))


def test_more_mistakes(tmp_path):
    write(tmp_path, train__en=ENGLISH, train__de=GERMAN)
    for languages, told in (
        (("fr", None), "source fr: .* does not have such files; their endings are de, en"),
        (("en", "en"), "both en"),
    ):
        with pytest.raises(KinformerError, match=told):
            open_pairs(str(tmp_path), languages=Languages(*languages))
    with pytest.raises(KinformerError, match="does not exist, and no file's name begins with it"):
        open_pairs(str(tmp_path / "valid"))
    with pytest.raises(KinformerError, match="holdout is 2"):
        open_pairs(str(tmp_path), holdout=2)
    (tmp_path / "train.de").write_bytes(b"Zeile\n" * 3 + b"\xff\n")
    with pytest.raises(KinformerError, match="train.de, line 4: is not UTF-8"):
        open_pairs(str(tmp_path))
    (tmp_path / "train.de").write_bytes(gzip.compress(b"Zeile\n" * 400)[:-6])
    with pytest.raises(KinformerError, match="train.de: cannot be unpacked"):
        open_pairs(str(tmp_path))
    (tmp_path / "x.tsv").write_text("en\tde\tfr\n1\t2\t3\n")
    with pytest.raises(KinformerError, match="names 3 columns; say by source and target which two"):
        open_pairs(str(tmp_path / "x.tsv"), languages=Languages("de"))
    (tmp_path / "x.tsv").write_text("a\tb\nc\td\n")
    with pytest.raises(KinformerError, match="its first line names no column 'de'"):
        open_pairs(str(tmp_path / "x.tsv"), languages=Languages("de"))


def test_number_words():
    assert [english(number) for number in (0, 16, 21, 100, 1001, 342_071)] == [
        "zero", "sixteen", "twenty-one", "one hundred", "one thousand one",
        "three hundred forty-two thousand seventy-one",
    ]  # fmt: skip
    assert [german(number) for number in (0, 1, 16, 21, 101, 1001, 101_000, 342_071)] == [
        "null", "eins", "sechzehn", "einundzwanzig", "einhunderteins", "eintausendeins", "einhunderteintausend",
        "dreihundertzweiundvierzigtausendeinundsiebzig",
    ]  # fmt: skip
    made = open_pairs("number-words")
    assert len({german(number) for number in range(3000)}) == 3000
    assert not set(made.splits["test"].source) & set(made.splits["train"].source)


def test_every_pair_once_an_epoch_in_batches_of_like_length():
    widths = np.random.default_rng(0).integers(3, 40, 500)
    batches = TokenBatches(widths, tokens=128, seed=1)
    epochs = []
    for epoch in range(2):
        found = [batches.indices(epoch * batches.batches + number) for number in range(batches.batches)]
        assert sorted(np.concatenate(found).tolist()) == list(range(500))
        assert all(len(each) * widths[each].max() <= 128 for each in found)
        epochs.append(found)
    padding = sum(len(each) * widths[each].max() for each in epochs[0]) / widths.sum()
    assert padding < 1.1 and not all(map(np.array_equal, *epochs))
    again = TokenBatches(widths, tokens=128, seed=1).indices(batches.batches + 3)
    assert np.array_equal(again, epochs[1][3])
    shared = TokenBatches(widths, tokens=128, seed=1, multiple=4)
    assert all(len(shared.indices(number)) % 4 == 0 for number in range(shared.batches))
