"""Whatever is done to the files of a run, who reads them is told one sentence, and no file is waited for."""

import json
import os
import random
import shutil

import pytest

import kinformer
from kinformer.lab.data.tokenizer import ByteTokenizer
from kinformer.lab.training.checkpoint import Checkpoints, _digest
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, read_json, signed

SMALL = {"recipe": "tiny", "steps": 2, "length": 16, "batch_size": 4, "validation_tokens": 64, "device": "cpu"}
VALUES = (None, -1, 0, 10**9, 10**400, 1e308, True, "", "../../x", [], {}, [[]], {"kind": []}, {"kind": "nothing"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    pytest.importorskip("tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        out = tmp_path_factory.mktemp("runs") / "run"
        yield kinformer.train("linear-transformer", data=text_file, out=out, train_tokenizer=300, **SMALL)


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained.folder, tmp_path / "run", ignore=shutil.ignore_patterns("events"))


def use(folder):
    """All that is read of a run; True where nobody minded."""
    try:
        run = kinformer.open_run(folder)
        assert run.tokenizer is not None and run.metrics is not None
        run.model()
        Checkpoints(folder / "checkpoints", 1).load()
    except KinformerError as error:
        assert "\n" not in str(error) and str(folder) in str(error), error
        return False
    return True


def mutated(data, draw):
    """``data`` with one value, somewhere inside, removed or replaced."""
    data = json.loads(json.dumps(data))
    node = data
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], (dict, list)) and node[key] and draw.random() < 0.8:
            node = node[key]
            continue
        if draw.random() < 0.2:
            del node[key]
        else:
            node[key] = draw.choice(VALUES)
        return data


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("name", ["config.json", "plan.json"])
def test_altered_tables(folder, name, signs):
    place = folder / name if name == "config.json" else max(folder.rglob("plan.json"))
    whole, draw = json.loads(place.read_text()), random.Random(len(name))
    bare = {key: value for key, value in whole.items() if key not in ("checksum", "sha256")}
    minded = 0
    for _ in range(40):
        data = mutated(bare if signs else whole, draw)
        if signs:
            data = signed(data) if name == "config.json" else data | {"sha256": _digest(data)}
        place.write_text(json.dumps(data))
        minded += not use(folder)
    assert minded > 20
    place.write_text(json.dumps(whole))
    assert use(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "plan.json"])
def test_altered_bytes(folder, name):
    place = max(folder.rglob(name)) if name == "plan.json" else folder / name
    whole, draw = place.read_bytes(), random.Random(len(name))
    for _ in range(15):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(min(len(data), 600))] = draw.randrange(256)
        place.write_bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])
        assert place.read_bytes() == whole or not use(folder) or name in ("config.json", "plan.json")
    place.write_bytes(whole)
    assert use(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"a": ' * 5000, "", "\0", "null", "[]", "nan"])
def test_strange_json(folder, text):
    for place in (folder / "config.json", max(folder.rglob("plan.json")), folder / "tokenizer.json"):
        whole = place.read_bytes()
        place.write_text(text)
        assert not use(folder)
        place.write_bytes(whole)


def test_what_is_no_file_is_not_opened(folder):
    for place in (folder / "config.json", folder / "model.safetensors", folder / "tokenizer.json"):
        kept = place.rename(place.with_suffix(".kept"))
        for make, told in ((os.mkfifo, "is not a regular file"), (os.mkdir, "is a folder")):
            make(place)
            with pytest.raises(KinformerError, match=f"{place.name}: {told}"):
                (load_tensors if place.suffix == ".safetensors" else read_json)(place)
            assert not use(folder)
            place.rmdir() if place.is_dir() else place.unlink()
        kept.rename(place)
    assert use(folder)


def test_names_that_are_not_utf8(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, run = (os.fsdecode(name) for name in (b"book\xff.txt", b"run\xff"))
    shutil.copyfile(text_file, data)
    with pytest.raises(KinformerError, match="its name is not UTF-8"):
        kinformer.train("gpt", data=data, out=run, **SMALL)
    assert not os.path.exists(run)
    kinformer.train("gpt", data=data, out="run", **SMALL)
    assert kinformer.evaluate("run", first=99).data["same_as_run"]
    os.rename("run", run)
    with pytest.raises(KinformerError, match="its name is not UTF-8"):
        kinformer.load(run)


def test_a_prompt_of_no_characters_is_refused(folder):
    for tokenizer in (kinformer.open_run(folder).tokenizer, ByteTokenizer()):
        for prompt in ("a\ud800", "\udfff"):
            with pytest.raises(KinformerError, match="half of a surrogate pair"):
                tokenizer.encode(prompt)
