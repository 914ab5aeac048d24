"""Files that are made to harm their reader: each reader answers with one sentence that names the file, and takes
neither the memory nor the time that the file asks for."""

import gzip
import io
import json
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kinformer.core.config import KinformerError
from kinformer.interop.checkpoint import read_checkpoint
from kinformer.lab.cli.form import read as read_options
from kinformer.lab.comparison.record import Cache
from kinformer.lab.control.trajectories import open_trajectories
from kinformer.lab.data.files import check_plain, write_field
from kinformer.lab.data.images import read_images
from kinformer.lab.data.labelled import open_labelled
from kinformer.lab.data.pairs import open_pairs
from kinformer.lab.data.tokenizer import FileTokenizer
from kinformer.runtime.files import read_json

MOST_MEMORY = 200 << 20


def deep(text: str) -> str:
    return text.replace("VALUE", "[" * 100_000 + "]" * 100_000)


def long(text: str) -> str:
    return text.replace("VALUE", "1" * 5_000)


def half(text: str) -> str:
    return text.replace("VALUE", '"\\ud800"')


JSON_READERS = {
    "json": ("a.json", '{"a": VALUE}', lambda path: read_json(path)),
    "labelled": ("a.jsonl", '{"text": VALUE, "label": 1}\n', lambda path: open_labelled(str(path))),
    "pairs": ("a.jsonl", '{"source": VALUE, "target": "b"}\n', lambda path: open_pairs(str(path))),
    "field": ("a.jsonl", '{"text": VALUE}\n', lambda path: write_field(path, "text", io.BytesIO())),
    "checkpoint": ("config.json", '{"model_type": VALUE}', lambda path: read_checkpoint(path.parent)),
    "cache": ("run-key.json", '{"value": VALUE}', lambda path: Cache(path.parent).get("run", "key")),
}


@pytest.mark.parametrize("bomb", [deep, long, half])
@pytest.mark.parametrize("name", JSON_READERS)
def test_json(tmp_path, name, bomb):
    file, text, read = JSON_READERS[name]
    (tmp_path / file).write_text(bomb(text) * 3 if file.endswith("jsonl") else bomb(text))
    what = {deep: "nest deeper than 200", long: "thousands of digits", half: "half of a surrogate pair"}[bomb]
    with pytest.raises(KinformerError, match=f"{file}.*{what}"):
        read(tmp_path / file)


def test_what_json_nests_is_limited_in_depth_and_not_in_length(tmp_path):
    for content in ({"a": [[1]] * 9_000}, "[" * 9_000, json.loads("[" * 200 + "]" * 200)):
        (tmp_path / "a.json").write_text(json.dumps(content))
        assert read_json(tmp_path / "a.json") == content
    (tmp_path / "a.json").write_text("[" * 201 + "]" * 201)
    with pytest.raises(KinformerError, match="nest deeper than 200"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("value", ["[" * 9_000, "[" * 300 + "]" * 300, "1" * 5_000, "{a=" * 5_000, "2000-99-99"])
def test_toml(tmp_path, value):
    (tmp_path / "run.toml").write_text(f"steps = {value}\n")
    with pytest.raises(KinformerError, match="run.toml: is not TOML"):
        read_options(str(tmp_path / "run.toml"), {"steps": int})


STRANGE = [
    "null",
    "[]",
    '"text"',
    "5",
    "{}",
    '{"value": 5}',
    '{"files": {}}',
    '{"files": [], "checksum": "0"}',
    "",
    "{",
]


@pytest.mark.parametrize("text", STRANGE)
def test_caches_of_strange_content(tmp_path, text):
    cache = Cache(tmp_path)
    cache.put("run", "key", {"steps": 5})
    assert cache.get("run", "key") == {"steps": 5}
    cache.path("run", "key").write_text(text)
    with pytest.raises(KinformerError, match="run-key.json: "):
        cache.get("run", "key")
    (tmp_path / "a.tsv").write_text("".join(f"{n % 2}\ttext {n}\n" for n in range(60)))
    open_labelled(str(tmp_path / "a.tsv"), cache=tmp_path)
    (about,) = tmp_path.glob("labelled/*/about.json")
    about.write_text(text)
    with pytest.raises(KinformerError, match=r"about.json|is damaged"):
        open_labelled(str(tmp_path / "a.tsv"), cache=tmp_path)


def test_a_cache_damaged_in_any_byte_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f"{n % 2}\ttext {n}\n" for n in range(60)))
    data = open_labelled(str(tmp_path / "a.tsv"), cache=tmp_path)
    (about,) = tmp_path.glob("labelled/*/about.json")
    content = about.read_bytes()
    for place in range(0, len(content), 3):
        about.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            again = open_labelled(str(tmp_path / "a.tsv"), cache=tmp_path)
        except KinformerError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)
        else:  # blanks between values
            assert again.classes == data.classes and chr(content[place]).isspace()


def member(name: str, size: int, announced: int) -> bytes:
    """A .npz whose array ``name`` has a head for ``announced`` bytes and ``size`` zeros, which compress to little."""
    head = b"\x93NUMPY\x01\x00v\x00" + f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({announced},), }}".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(f"{name}.npy", "w") as file:
        file.write(head.ljust(127) + b"\n")
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return packed.getvalue()


def zeros(size: int) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return packed.getvalue()


IDX = gzip.compress(bytes([0, 0, 8, 3]) + np.array([1 << 11, 1 << 10, 1 << 10], ">u4").tobytes() + bytes(1 << 20))
ARCHIVES = {
    "pairs": ("a.tsv.gz", lambda: zeros(1 << 28), open_pairs, "times its size"),
    "trajectories": ("a.npz", lambda: member("observations", 1 << 28, 1 << 28), open_trajectories, "times its size"),
    "trajectories that lie": (
        "a.npz",
        lambda: member("observations", 0, 1 << 60),
        open_trajectories,
        "shorter than its head",
    ),
    "images": ("a.npz", lambda: member("images", 1 << 28, 1 << 28), read_images, "times its size"),
    "images that lie": ("a.npz", lambda: member("images", 0, 1 << 60), read_images, "shorter than its head"),
    "IDX": ("images-idx3-ubyte.gz", lambda: IDX, read_images, "has fewer bytes than"),
    "text": ("a", lambda: zeros(1 << 20), lambda path: check_plain(Path(path)), "is gzip-compressed"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, content, read, what = ARCHIVES[name]
    (tmp_path / file).write_bytes(content())
    tracemalloc.start()
    try:
        with pytest.raises(KinformerError, match=f"{file}.*{what}"):
            read(str(tmp_path / file))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def tokenizer_file(path, normalizers=(), decoders=(), pattern=None):
    """A tokenizer.json of letters."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE(vocab={chr(97 + n): n for n in range(26)}, merges=[]))
    made.normalizer = library.normalizers.Sequence([library.normalizers.Replace(*each) for each in normalizers])
    if decoders:
        made.decoder = library.decoders.Sequence([library.decoders.Replace(*each) for each in decoders])
    if pattern:
        made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    made.save(str(path))
    return path


GROWING = {
    "doubled 40 times": [("a", "aa")] * 40,
    "in turns": [("a", "bb"), ("b", "aa")] * 20,
    "over the bounds of two": [("a", "bb"), *[("bbbb", "bbbbbbbb")] * 20],
    "long": [("a", "b" * 1000)],
    "many": [("ab", "b")] * 10_000,
}


@pytest.mark.parametrize("name", GROWING)
def test_tokenizers_that_grow_a_text_are_refused(tmp_path, name):
    for part in ("normalizers", "decoders"):
        path = tokenizer_file(tmp_path / "tokenizer.json", **{part: GROWING[name]})
        with pytest.raises(KinformerError, match=f"tokenizer.json: its {part[:-1]} may make a text more than 64 times"):
            FileTokenizer(path)


def test_growing_by_a_regular_expression_is_refused_and_usual_replacements_are_not(tmp_path):
    library = pytest.importorskip("tokenizers")
    anything = library.Regex(".")
    with pytest.raises(KinformerError, match="more than 64 times"):
        FileTokenizer(tokenizer_file(tmp_path / "a.json", [(anything, "aa")] * 5))
    usual = [("``", '"'), ("\n", "<n>"), ("\t", "<|tab|>"), *((" " * n, f"<|space{n}|>") for n in range(9, 1, -1))]
    tokenizer = FileTokenizer(tokenizer_file(tmp_path / "b.json", [*usual, (library.Regex(" {2,}"), " ")]))
    assert len(tokenizer.encode("abc")) == 3


def test_a_regular_expression_that_never_ends_is_one_sentence(tmp_path):
    tokenizer = FileTokenizer(tokenizer_file(tmp_path / "tokenizer.json", pattern="(a+)+$"))
    with pytest.raises(KinformerError, match="the tokenizer: cannot encode this text .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_tokens_of_huge_numbers_are_refused(tmp_path):
    path = tokenizer_file(tmp_path / "tokenizer.json")
    made = json.loads(path.read_text())
    made["model"]["vocab"]["z"] = 4_000_000_000
    path.write_text(json.dumps(made))
    with pytest.raises(KinformerError, match="its highest token is 4000000000"):
        FileTokenizer(path)


def npz(**arrays):
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    return packed.getvalue()


LINES = {
    ".tsv": b"".join(b"%d\ttext %d\n" % (number % 2, number) for number in range(12)),
    ".jsonl": b"".join(b'{"source": "%d", "target": "b", "text": "c", "label": %d}\n' % (n, n % 2) for n in range(12)),
}
EPISODES = npz(observations=np.ones((12, 2)), actions=np.arange(12) % 2, rewards=np.ones(12), ends=np.arange(3, 13, 3))
WHOLE = {
    "trajectories": ("a.npz", EPISODES, open_trajectories),
    "images": ("a.npz", npz(images=np.ones((12, 2, 2), np.uint8), labels=np.arange(12) % 2), read_images),
    "labelled table": ("a.tsv", LINES[".tsv"], open_labelled),
    "labelled lines": ("a.jsonl", LINES[".jsonl"], open_labelled),
    "pairs in a table": ("a.tsv", LINES[".tsv"], open_pairs),
    "pairs in lines": ("a.jsonl", LINES[".jsonl"], open_pairs),
    "packed pairs": ("a.tsv.gz", gzip.compress(LINES[".tsv"]), open_pairs),
    "json": ("a.json", b'{"a": [1, 2, {"b": null}]}', lambda path: read_json(Path(path))),
    "options": ("a.toml", b"steps = 5\n", lambda path: read_options(path, {"steps": int})),
}


@pytest.mark.parametrize("name", WHOLE)
def test_damage_anywhere_is_one_sentence_and_nothing_is_waited_for(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, content, read = WHOLE[name]
    path, step = tmp_path / file, max(1, len(content) // 40)
    path.write_bytes(content)
    read(str(path))
    path.unlink()
    damaged = [content[:size] for size in range(0, len(content), step)]
    damaged += [content[:at] + bytes([content[at] ^ 0x81]) + content[at + 1 :] for at in range(0, len(content), step)]
    makers = [lambda data=data: path.write_bytes(data) for data in damaged]
    special = [lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to("/dev/zero")]
    for make in [*makers, *special]:
        make()
        try:
            read(str(path))
        except KinformerError as error:
            assert file in str(error) and "\n" not in str(error)
        else:
            assert make not in special
        path.rmdir() if path.is_dir() else path.unlink()
