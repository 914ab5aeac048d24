"""Text to ids and back, and ids kept in a file."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinformer.lab.data import ByteTokenizer, EvaluationStream, FileTokenizer, first_bytes, open_corpus, train_tokenizer
from kinformer.lab.data import corpus as corpus_module
from kinformer.lab.data import files as extents
from kinformer.lab.data.packed import encode_split
from kinformer.lab.data.tokenizer import PIECE, _byte_values, prompt_ids, text_pieces
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import take
from tests.interop.peers import blank_tokenizer


@pytest.fixture
def tokenizer(text_file, tmp_path):
    return train_tokenizer(open_corpus(str(text_file)).splits["train"], 300, tmp_path / "made" / "tokenizer.json")


def streamed(tokenizer, tokens):
    stream = tokenizer.stream()
    return "".join([stream.feed(int(token)) for token in tokens] + [stream.finish()])


@pytest.fixture(scope="module")
def blanks(tmp_path_factory):
    """A tokenizer whose decoder drops the blank at the beginning of a text."""
    folder = tmp_path_factory.mktemp("blanks")
    blank_tokenizer(folder)
    return FileTokenizer(folder / "tokenizer.json", prefix=(1,))


@given(text=st.text())
def test_bytes_come_back_whole_and_streamed(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64 and tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == streamed(tokenizer, tokens) == text


@given(data=st.binary())
def test_any_bytes_decode_the_same_streamed(data):
    tokenizer = ByteTokenizer()
    assert streamed(tokenizer, data) == tokenizer.decode(data) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "text",
    ["hello there", "the \u20ac\u20ac and \u20acuro \U0001f642\U0001f642\U0001f642\U0001f642 x", " two  blanks "],
)
def test_a_text_continues_behind_what_stands_before_it(blanks, text):
    tokens = blanks.encode(text).tolist()
    assert streamed(blanks, tokens) == blanks.decode(tokens)
    for place in range(1, len(tokens)):
        before = blanks.decode(tokens[:place])
        stream = blanks.stream(tokens[:place])
        rest = "".join([stream.feed(token) for token in tokens[place:]] + [stream.finish()])
        if not before.endswith("\ufffd"):
            assert before + rest == blanks.decode(tokens)


def test_bytes_that_are_no_text_are_shown_before_the_end(blanks):
    token = int(blanks.encode("\x80")[-1])  # the byte 80, which begins no character
    stream = blanks.stream()
    shown = [stream.feed(token) for _ in range(50)]
    assert shown == ["\ufffd"] * 50 and stream.finish() == ""
    stream = blanks.stream()
    told = [stream.feed(one) for one in (*blanks.encode("\u20ac").tolist()[-3:], token, *blanks.encode("ab").tolist())]
    assert told[2] == "\u20ac" and "".join(told).endswith("\ufffd ab")


@pytest.fixture(scope="module")
def straddling(tmp_path_factory):
    """A byte-level tokenizer with a token (256) of the last byte of a character and the first two of the same."""
    from tokenizers import Tokenizer, decoders, models

    signs = [sign for sign, _ in sorted(_byte_values().items(), key=lambda item: item[1])]
    first, second, third = (signs[byte] for byte in "\u65e5".encode())
    made = Tokenizer(models.BPE({sign: byte for byte, sign in enumerate([*signs, third + first + second])}, []))
    made.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("straddling") / "tokenizer.json"
    made.save(str(path))
    return FileTokenizer(path)


@given(data=st.data())
def test_any_tokens_decode_the_same_streamed(blanks, straddling, data):
    for tokenizer in (blanks, straddling):
        tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)


def test_characters_that_straddle_many_tokens_are_streamed(straddling):
    first, second, third = "\u65e5".encode()
    stream = straddling.stream()
    told = [stream.feed(token) for token in (first, second, *[256] * 6, third)]
    assert told == ["", "", *["\u65e5"] * 7] and stream.finish() == ""
    assert [stream.feed(token) for token in (255, first, 97)] == ["\ufffd", "", "\ufffda"]


def test_bytes_are_spelled_as_the_library_spells_them():
    from tokenizers import pre_tokenizers

    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "\u65e5 \x00\x7f\xad\xa0 a\n"
    assert bytes(map(_byte_values().get, spelled.pre_tokenize_str(text)[0][0])) == text.encode()
    assert set(_byte_values()) == set(spelled.alphabet())


def test_a_token_is_spelled_with_its_blank(blanks, tokenizer):
    ids = blanks.encode("b")[-1], blanks.encode("xb")[-1]
    assert [blanks.spell(token) for token in ids] == [" b", "b"]
    assert tokenizer.spell(tokenizer.encode("x y")[1]) == " "
    assert ByteTokenizer().spell(98) == "b"


def test_a_prompt_begins_with_the_prefix_once(blanks, tokenizer):
    assert prompt_ids(blanks, "dog").tolist() == [1, *blanks.encode("dog")]
    assert prompt_ids(blanks, "<s>dog").tolist() == blanks.encode("<s>dog").tolist()
    assert prompt_ids(blanks, "").tolist() == []
    assert prompt_ids(tokenizer, "dog").tolist() == tokenizer.encode("dog").tolist()


def test_bytes_that_are_no_text_come_back_from_the_command_line():
    assert ByteTokenizer().encode(b"\xff\xfe".decode("utf-8", "surrogateescape")).tolist() == [255, 254]


def test_a_trained_tokenizer_loses_nothing(tokenizer, tmp_path):
    for text in ("the river and the naïve bird", "日本語 🙂\n\n  x\t", "", "€" * 50):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == streamed(tokenizer, tokens) == text
        assert (tokens < tokenizer.vocab_size).all()
    assert 256 < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode("river and stone")) < 15
    tokenizer.save(tmp_path / "copy.json")
    copy = FileTokenizer(tmp_path / "copy.json")
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode("under the wind").tolist() == tokenizer.encode("under the wind").tolist()


def test_incomplete_characters_wait_for_their_rest(tokenizer):
    for codec in (ByteTokenizer(), tokenizer):
        stream = codec.stream()
        told = [stream.feed(int(token)) for token in codec.encode("🙂")]
        assert "".join(told) == "🙂" and all(part in ("", "🙂") for part in told)
        cut = codec.stream()
        assert [cut.feed(int(token)) for token in codec.encode("🙂")[:-1]][-1] == ""
        assert "\N{REPLACEMENT CHARACTER}" in cut.finish()


def test_special_tokens_truncation_and_padding_stay_out(tokenizer, tmp_path):
    from tokenizers import Tokenizer

    changed = Tokenizer.from_buffer(tokenizer.source)
    changed.enable_truncation(4)
    changed.enable_padding(length=1000)
    changed.add_special_tokens(["<end>"])
    changed.save(str(tmp_path / "changed.json"))
    loaded = FileTokenizer(tmp_path / "changed.json")
    text = "the river sings under the stone"
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert loaded.vocab_size == tokenizer.vocab_size + 1


def test_a_tokenised_corpus_is_the_same_text(text_file, tokenizer, tmp_path):
    plain = open_corpus(str(text_file))
    corpus = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path / "cache")
    assert corpus.identity == plain.identity
    for name, split in corpus.splits.items():
        assert split.dtype == np.uint16 and split.vocab_size == tokenizer.vocab_size
        assert len(split) < split.bytes == len(plain.splits[name])
        text = plain.splits[name].tokens(0, split.bytes).tobytes()
        assert tokenizer.decode(split.tokens(0, len(split))) == text.decode()
        assert split.text.tokens(0, split.bytes).tobytes() == text
    stream = EvaluationStream(corpus.splits["test"], 16)
    assert stream.bits_per_byte(0.0) == np.log2(tokenizer.vocab_size) / corpus.splits["test"].bytes


def test_documents_keep_their_bounds(folder, tokenizer, tmp_path):
    corpus = open_corpus(str(folder), tokenizer=tokenizer, cache=tmp_path)
    for split in corpus.splits.values():
        starts = [*split.documents.tolist(), len(split)]
        for piece, (start, stop) in zip(split.text.extents.pieces, pairwise(starts), strict=True):
            with open(piece.path) as file:
                assert tokenizer.decode(split.tokens(start, stop - start)) == file.read()


def test_splits_of_the_same_sizes_keep_their_own_ids(tokenizer, tmp_path):
    root = tmp_path / "alike"
    root.mkdir()
    for number in range(40):
        (root / str(number)).write_bytes(bytes([65 + number]) * 100)
    for holdout in (None, 0.05):
        corpus = open_corpus(str(root), tokenizer=tokenizer, cache=tmp_path / "cache", holdout=holdout)
        for split in corpus.splits.values():
            text = split.text.tokens(0, split.bytes).tobytes().decode()
            assert tokenizer.decode(split.tokens(0, len(split))) == text


def test_ids_are_written_once_and_again_when_anything_differs(text_file, tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = open_corpus(str(text_file), tokenizer=tokenizer, cache=cache).splits["train"]
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.*")}
    assert len(files) == 6

    def refuse(texts):
        raise AssertionError("encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_batch", refuse)
        again = open_corpus(str(text_file), tokenizer=tokenizer, cache=cache).splits["train"]
        assert np.array_equal(again.tokens(0, len(again)), first.tokens(0, len(first)))
        assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.*")} == files
        for change in ({"holdout": 0.3}, {"cache": tmp_path / "other"}):
            with pytest.raises(AssertionError, match="encoded again"):
                open_corpus(str(text_file), tokenizer=tokenizer, **({"cache": cache} | change))
        assert not list((tmp_path / "other").rglob("*.*"))
    other = train_tokenizer(open_corpus(str(text_file)).splits["train"], 280, tmp_path / "other.json")
    assert len(open_corpus(str(text_file), tokenizer=other, cache=cache).splits["train"]) > len(first)
    text_file.write_bytes(text_file.read_bytes().replace(b"wind", b"WIND"))
    changed = open_corpus(str(text_file), tokenizer=tokenizer, cache=cache).splits["train"]
    assert "WIND" in tokenizer.decode(changed.tokens(0, len(changed)))


def test_a_damaged_cache_is_written_again(text_file, tokenizer, tmp_path):
    whole = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path).splits["train"]
    expected = whole.tokens(0, len(whole)).tolist()
    for pattern, damage in (("*.ids", b"short"), ("*.npz", b"no archive"), ("*.npz", b"")):
        for path in (tmp_path / "tokens").glob(pattern):
            path.write_bytes(damage)
        again = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path).splits["train"]
        assert again.tokens(0, len(again)).tolist() == expected


def test_an_edited_file_does_not_meet_its_old_ids_where_contents_are_sampled(
    text_file, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(extents, "HASHED_WHOLE", 1000)
    monkeypatch.setattr(corpus_module, "HASHED_WHOLE", 1000)
    monkeypatch.setattr(extents, "_BLOCK", 1)
    before = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path)
    text_file.write_bytes(text_file.read_bytes()[:5] + b"WIND" + text_file.read_bytes()[9:])
    after = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path)
    assert before.fingerprint == after.fingerprint
    assert "WIND" in tokenizer.decode(after.splits["train"].tokens(0, 20))


@given(lines=st.lists(st.integers(0, 3 * PIECE), max_size=3), character=st.sampled_from(["a", "é", "€", "🙂"]))
def test_pieces_join_to_the_text_and_never_cut_a_character(make_split, lines, character):
    documents = [("x" + character * (size // len(character.encode())) + "\n").encode() for size in lines]
    if not documents:
        return
    pieces = list(text_pieces(make_split(*documents, b"the end")))
    assert b"".join(pieces) == b"".join(documents) + b"the end"
    assert all(0 < len(piece) <= PIECE and piece.decode() for piece in pieces)
    assert pieces[-1] == b"the end"


def test_a_head_knows_its_bytes(make_split, tokenizer, tmp_path):
    plain = make_split(b"river and stone\n" * 20_000, b"bird")
    split = encode_split(plain, tokenizer, tmp_path, "key")
    assert (split.take(len(split)) is split) and len(split.marks) > 4
    for length in (len(split) // 2, len(split) - 1):
        head = split.take(length)
        assert 0 < len(head) <= length < len(head) + PIECE
        assert head.bytes == len(tokenizer.decode(head.tokens(0, len(head))).encode())
        assert head.text.tokens(0, head.bytes).tobytes() == plain.tokens(0, head.bytes).tobytes()
    assert len(split.take(int(split.marks[2, 0]))) == split.marks[2, 0]
    assert 0 < split.take(1).bytes <= PIECE
    assert split.take(1).documents.tolist() == [0]
    assert (len(plain.take(7)), plain.take(7).bytes, plain.take(7).documents.tolist()) == (7, 7, [0])


def test_what_is_no_tokenizer_or_no_text_is_told(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(KinformerError, match="missing.json cannot be read"):
        FileTokenizer(tmp_path / "missing.json")
    (tmp_path / "wrong.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(KinformerError, match="wrong.json: is not a tokenizer.json"):
        FileTokenizer(tmp_path / "wrong.json")
    (tmp_path / "binary").write_bytes(b"text\n" * 30 + b"\xff" * 30)
    with pytest.raises(KinformerError, match="needs UTF-8 text but byte 0xff is not"):
        open_corpus(str(tmp_path / "binary"), tokenizer=tokenizer, cache=tmp_path)
    with pytest.raises(KinformerError, match="vocab_size is 100 but a byte-level tokenizer needs 256"):
        train_tokenizer(open_corpus(str(tmp_path / "binary")).splits["train"], 100, tmp_path / "t.json")
    tokenizer.save(tmp_path / "right.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(KinformerError, match=r"not installed; pip install 'kinformer\[text\]'"):
        FileTokenizer(tmp_path / "right.json")


def test_an_altered_cache_is_written_again_and_what_the_dead_left_goes(text_file, tokenizer, tmp_path):
    whole = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path).splits["train"]
    ids = Path(whole.extents.pieces[0].path)
    good = ids.read_bytes()
    ids.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    dead, alive, young = (ids.parent / f".{name}.ids.0a.partial" for name in ("dead", "alive", "young"))
    for path in (dead, alive, young):
        path.touch()
        if path != young:
            os.utime(path, (0, 0))
    with alive.open("ab") as file:
        assert take(file.fileno())
        again = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path).splits["train"]
    assert ids.read_bytes() == good and (again.tokens(0, 500) == whole.tokens(0, 500)).all()
    assert [path.exists() for path in (dead, alive, young)] == [False, True, True]


def test_the_first_bytes_are_a_text_of_their_own(text_file, tokenizer, tmp_path):
    corpus = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path)
    for split in corpus.splits.values():
        for count in (50, 333, split.bytes - 1):
            part = first_bytes(split, count, tokenizer)
            assert count - 3 < part.bytes <= count
            text = split.text.extents.read(0, part.bytes)
            assert tokenizer.decode(part.tokens(0, len(part))).encode() == text
            assert part.marks[-1].tolist() == [len(part), part.bytes]
        assert len(first_bytes(split, split.bytes, tokenizer)) == len(split)
