"""``kinformer index``, and ``evaluate`` and ``generate`` with its datastore."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.heads.language import KnnMixture
from kinformer.lab.data import open_corpus
from kinformer.lab.datastore import evaluate as datastore_evaluation
from kinformer.lab.datastore.attach import AttachedDecoder
from kinformer.lab.datastore.keys import KeyedDecoder
from kinformer.lab.datastore.search import ExactSearch
from kinformer.lab.datastore.store import Datastore, Writer
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.runs.options import EvaluateOptions
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.evaluation import EvaluationSettings
from kinformer.lab.tasks.texts import held_out

CHUNK = ("--chunk", 256)


def done(cli, *arguments):
    code, out, err = cli(*arguments, "--device", "cpu")
    assert code == 0, err
    return (json.loads(out) if "--json" in arguments else out), err


def index(cli, run, folder, *arguments):
    return done(cli, "index", run, "--datastore", folder, *CHUNK, *arguments, "--json")[0]


def refused(cli, *arguments):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    """Two sentences, again and again: 83 bytes, so that windows of 32 begin at every one of them."""
    path = tmp_path_factory.mktemp("other") / "sentences.txt"
    path.write_text("Where three roads meet, the old inn keeps its lamp lit.\nNobody asks you, who pays.\n" * 90)
    return path


@pytest.fixture
def store(cli, gpt_run, tmp_path):
    folder = tmp_path / "store"
    index(cli, gpt_run, folder)
    return folder


def test_entries_are_the_keys_and_the_next_tokens(cli, gpt_run, text_file, tmp_path):
    told = index(cli, gpt_run, tmp_path / "store", "--dtype", "float32", "--overlap", 0.5)
    split = open_corpus(str(text_file)).splits["train"]
    store = Datastore(tmp_path / "store")
    assert told["entries"] == told["new_entries"] == store.entries == len(split) - 1
    assert store.tokens.tolist() == split.tokens(1, len(split) - 1).tolist()
    tokens = torch.from_numpy(split.rows(np.array([16 * 20]), 32))
    keys = KeyedDecoder(kinformer.load(gpt_run))(tokens)[0].keys[0]
    assert (store.float_keys(slice(16 * 20 + 16, 16 * 20 + 32)) - keys[16:]).abs().max() < 1e-5


@pytest.mark.parametrize(("run", "options"), [("gpt_run", ()), ("linear_run", ("--context", "carried"))])
def test_a_stopped_build_goes_on_to_the_same_bytes(cli, request, tmp_path, monkeypatch, run, options):
    run = request.getfixturevalue(run)
    monkeypatch.setattr(Writer, "FLUSHED", 1000)
    index(cli, run, tmp_path / "whole", *options)
    append, count = Writer.append, iter(range(10**6))

    def mortal(self, keys, tokens):
        if next(count) in (13, 30):
            raise KeyboardInterrupt
        append(self, keys, tokens)

    monkeypatch.setattr(Writer, "append", mortal)
    for kept in ("3,072", "7,168"):
        code, _, err = cli("index", run, "--datastore", tmp_path / "cut", *CHUNK, *options, "--device", "cpu")
        assert code == 130 and f"kept {kept} entries" in err
        assert "is not finished" in refused(cli, "evaluate", run, "--datastore", tmp_path / "cut")
    index(cli, run, tmp_path / "cut", *options)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "cut").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name
    assert index(cli, run, tmp_path / "cut", *options)["new_entries"] == 0


def test_texts_are_appended_when_asked(cli, gpt_run, store, other_text):
    err = refused(cli, "index", gpt_run, "--datastore", store, "--data", other_text)
    assert "add --append" in err
    told = index(cli, gpt_run, store, "--data", other_text, "--append", "--split", "all")
    parts = open_corpus(str(other_text)).splits.values()
    assert told["new_entries"] == sum(len(part) - 1 for part in parts)
    assert index(cli, gpt_run, store, "--data", other_text, "--append", "--split", "all")["new_entries"] == 0


def test_other_peoples_and_damaged_stores_are_refused(cli, gpt_run, linear_run, tokenized_run, store):
    for command in (("evaluate", linear_run), ("index", linear_run), ("generate", linear_run, "--prompt", "x")):
        assert "belongs to another model" in refused(cli, *command, "--datastore", store)
    assert "belongs to another model" in refused(cli, "evaluate", tokenized_run, "--datastore", store)
    data = (store / "keys.bin").read_bytes()
    (store / "keys.bin").write_bytes(data[:-2])
    for command in (("evaluate", gpt_run), ("generate", gpt_run, "--prompt", "x")):
        assert "keys.bin: is truncated" in refused(cli, *command, "--datastore", store)
    (store / "keys.bin").write_bytes(b"\0" * len(data))
    assert "keys.bin: is damaged" in refused(cli, "evaluate", gpt_run, "--datastore", store)
    assert "is not a datastore" in refused(cli, "evaluate", gpt_run, "--datastore", store.parent)


def test_figures_are_those_of_the_library(cli, gpt_run, store, text_file):
    options = ("--datastore", store, "--weight", 0.4, "--neighbours", 5, "--knn-temperature", 20)
    told, err = done(cli, "evaluate", gpt_run, *options, "--json")
    split, model = open_corpus(str(text_file)).splits["test"], kinformer.load(gpt_run)
    head = KnnMixture(ExactSearch(Datastore(store)), weight=0.4, neighbours=5, temperature=20.0)
    wanted = measure(AttachedDecoder(model, head), split, Windows(context=32))
    assert told["bits_per_byte"] == pytest.approx(wanted.bits_per_byte, rel=1e-5)
    alone = measure(model, split, Windows(context=32))
    assert told["bits_per_byte_alone"] == pytest.approx(alone.bits_per_byte, rel=1e-5)
    assert (told["weight"], told["temperature"], told["neighbours"]) == (0.4, 20, 5)
    assert told["recall"] is None and told["bytes_read_per_query"] > 0 and err == ""
    assert dict(map(tuple, told["weights"]))[0.0] == told["bits_per_byte_alone"]


def test_a_new_text_helps_without_training(cli, gpt_run, store, other_text, tmp_path):
    """And the more of it the better; what is tuned on is never what is reported."""
    before = index(cli, gpt_run, store)["entries"]
    index(cli, gpt_run, store, "--data", other_text, "--append")
    arguments = ("evaluate", gpt_run, "--datastore", store, "--data", other_text, "--tune", "--sizes", before)
    told, _ = done(cli, *arguments, "--json")
    assert told["bits_per_byte"] < 0.5 * told["bits_per_byte_alone"]
    assert [each["entries"] for each in told["sizes"]] == [before, told["entries"]]
    assert told["bits_per_byte"] < told["sizes"][0]["bits_per_byte"]
    assert told["tuned_on"]["split"] == "validation" and told["data"]["split"] == "test"
    text, err = done(cli, *arguments, "--plot", tmp_path / "curves.svg")
    assert f"{told['bits_per_byte']:.4f} bits per byte with weight {told['weight']:g}" in text
    assert f"{told['bits_per_byte_alone']:.4f} with weight 0, which is the model alone" in text
    assert (tmp_path / "curves.svg").stat().st_size > 1000 and "drew" in err


def test_tuning_and_reporting_never_share_a_token(cli, gpt_run, text_file):
    run, options = open_run(gpt_run), EvaluateOptions(datastore="store", tune=True)
    held = held_out(run, EvaluationSettings())
    tuning, reported = datastore_evaluation._parts(held, options)
    assert (tuning.name, reported.name, reported.bytes) == ("validation", "test", held.split.bytes)
    for split, holdout in (("validation", None), ("train", None), ("test", 0.5)):
        held = held_out(run, EvaluationSettings(split=split), holdout)
        tuning, reported = datastore_evaluation._parts(held, options)
        text = held.split.tokens(0, len(held.split)).tobytes()
        cut = len(tuning)
        assert tuning.tokens(0, cut).tobytes() == text[:cut]
        assert reported.tokens(0, len(reported)).tobytes() == text[cut:]
        assert abs(cut - len(reported)) <= 1
    assert datastore_evaluation._parts(held, replace(options, tune=False)) == (None, held.split)


def test_text_in_the_store_is_no_held_out_text(cli, gpt_run, store):
    _, err = done(cli, "evaluate", gpt_run, "--datastore", store, "--split", "train", "--first", 100)
    assert "the train split of words.txt is in the datastore itself" in err


def test_held_out_text_of_another_split_or_holdout_is_noticed_in_the_store(cli, gpt_run, store, tmp_path):
    """The store holds the first 90 % of the text; at ``--holdout 0.3`` the last 30 % are measured."""
    _, err = done(cli, "evaluate", gpt_run, "--datastore", store, "--first", 100)
    assert "note" not in err
    _, err = done(cli, "evaluate", gpt_run, "--datastore", store, "--holdout", 0.3, "--weight", 0.5)
    assert "note: 66.7% of the test split of words.txt is in the datastore itself" in err
    assert "note: 66.7% of the test split of words.txt is among the text that the run was trained on" in err
    index(cli, gpt_run, tmp_path / "all", "--split", "all")
    _, err = done(cli, "evaluate", gpt_run, "--datastore", tmp_path / "all", "--holdout", 0.1, "--tune")
    assert err.count("note: the test split of words.txt is in the datastore itself") == 1
    index(cli, gpt_run, tmp_path / "part", "--first", 1000)
    _, err = done(cli, "evaluate", gpt_run, "--datastore", tmp_path / "part", "--holdout", 0.1)
    assert "datastore itself" not in err


def test_approximate_search_tells_its_recall(cli, gpt_run, store):
    pytest.importorskip("faiss")
    told = index(cli, gpt_run, store, "--approximate", "--lists", 30)
    assert (told["new_entries"], told["lists"]) == (0, 30)
    options = ("--datastore", store, "--neighbours", 8, "--first", 400, "--json")
    exact, _ = done(cli, "evaluate", gpt_run, *options, "--probes", 0)
    assert (exact["approximate"], exact["probes"], exact["recall"]) == (False, None, None)
    default, err = done(cli, "evaluate", gpt_run, *options)
    assert (default["approximate"], default["probes"]) == (
        True,
        8,
    ) and "approximately, in 8 of the datastore's lists" in err
    every, _ = done(cli, "evaluate", gpt_run, *options, "--probes", 30)
    few, _ = done(cli, "evaluate", gpt_run, *options, "--probes", 2, "--sizes", 500)
    assert every["recall"] == 1.0 and every["bits_per_byte"] == pytest.approx(exact["bits_per_byte"], rel=1e-6)
    assert 0.5 < few["recall"] < 1.0 and few["recall_queries"] >= 200
    assert [each["recall"] for each in few["sizes"]] == [None, few["recall"]]
    assert few["bytes_read_per_query"] < every["bytes_read_per_query"]
    assert "probes is 31 but must be 1 to 30" in refused(cli, "evaluate", gpt_run, *options, "--probes", 31)


def test_generation_asks_the_store(cli, gpt_run, store, other_text):
    folder = Path(f"{store}-other")
    index(cli, gpt_run, folder, "--data", other_text, "--context", 128)
    options = ("--prompt", "Where three roads meet, the o", "--max-new-tokens", 25, "--temperature", 0, "--json")
    plain, _ = done(cli, "generate", gpt_run, *options)
    mixed, _ = done(cli, "generate", gpt_run, *options, "--datastore", folder, "--weight", 0.99)
    assert mixed["samples"][0]["text"] == "ld inn keeps its lamp lit"
    assert plain["samples"][0]["text"] != mixed["samples"][0]["text"]
    same, _ = done(cli, "generate", gpt_run, *options, "--datastore", folder, "--weight", 0)
    assert same["samples"] == plain["samples"]


def test_what_contradicts_is_told(cli, gpt_run, store, tmp_path):
    assert "give --datastore FOLDER too" in refused(cli, "evaluate", gpt_run, "--weight", 0.3)
    assert "give --datastore FOLDER too" in refused(cli, "evaluate", gpt_run, "--tune")
    assert "give --datastore FOLDER too" in refused(cli, "generate", gpt_run, "--prompt", "x", "--neighbours", 3)
    with_store = ("evaluate", gpt_run, "--datastore", store)
    assert "is found by --tune" in refused(cli, *with_store, "--tune", "--weight", 0.3)
    assert "--weight is 1.5 but must lie between" in refused(cli, *with_store, "--weight", 1.5)
    assert "does not go together with --datastore" in refused(cli, *with_store, "--contexts", "16")
    assert "give one DIR" in refused(cli, "evaluate", gpt_run, gpt_run, "--datastore", store)
    assert "--sizes ten: is not a list" in refused(cli, *with_store, "--sizes", "ten")
    assert "not sorted into lists" in refused(cli, *with_store, "--probes", 2)
    assert "add --approximate" in refused(cli, "index", gpt_run, "--datastore", store, "--lists", 5)
    assert "'trian' is unknown" in refused(cli, "index", gpt_run, "--datastore", tmp_path / "x", "--split", "trian")
    assert not (tmp_path / "x").exists()
