"""A member whose head looks things up (spalm), from the command line: trained, resumed, measured, generated with."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.parts import NeedsStore
from kinformer.core.stack import HeadConfig
from kinformer.family.build import configure
from kinformer.lab.cli.main import main
from kinformer.lab.data import open_corpus
from kinformer.lab.datastore.attach import attach_store, looks_up
from kinformer.lab.datastore.keys import KeyedDecoder
from kinformer.lab.datastore.search import ExactSearch
from kinformer.lab.datastore.store import Datastore
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.runs.minutes import with_vocabulary
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.runs.rows import plan_of, rows_of
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.table import task_for
from kinformer.lab.training.settings import Settings

SETTINGS = (
    "--recipe tiny --length 32 --batch-size 4 --steps 6 --validation-tokens 256 --set training.log_every=1 --threads 1"
)
TINY = SETTINGS.split()


def done(cli, *arguments):
    code, out, err = cli(*arguments, "--device", "cpu")
    assert code == 0, err
    return (json.loads(out) if "--json" in arguments else out), err


def refused(cli, *arguments):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def store(gpt_run, tmp_path_factory):
    """Of the training split, by a run of windows of 32; tests only read it."""
    folder = tmp_path_factory.mktemp("retrieval") / "store"
    kinformer.index(gpt_run, datastore=folder, device="cpu", quiet=True)
    return folder


@pytest.fixture
def carried(cli, linear_run, tmp_path):
    """Of the training split, by a run whose state is carried."""
    done(cli, "index", linear_run, "--datastore", tmp_path / "carried", "--context", "carried", "--chunk", 256)
    return tmp_path / "carried"


def train(text_file, out, store, retriever, *arguments):
    where = ("--data", text_file, "--out", out, "--datastore", store, "--retriever", retriever)
    return ("train", "spalm", *TINY, *where, *arguments)


@pytest.fixture(scope="module")
def spalm_run(text_file, gpt_run, store):
    """A run that tests only read."""
    words = train(text_file, store.with_name("run"), store, gpt_run, "--neighbours", 3, "--device", "cpu", "--quiet")
    assert main([str(word) for word in words]) == 0
    return store.with_name("run")


def test_rows_of_training_and_validation_are_right(cli, spalm_run, gpt_run, store, text_file):
    corpus, run = open_corpus(str(text_file)), open_run(spalm_run)
    settings = Settings(**dict(run.training))
    data = rows_of(run, plan_of(run, settings), "cpu")
    opened = Datastore(store)
    start = int(data.sampler.starts(5)[2])
    batch = data.batch(5, 0, 1)
    assert batch.neighbours.shape == (4, 32, 3)
    assert batch.tokens[2].tolist() == corpus.splits["train"].tokens(start, 33).tolist()
    found = ExactSearch(opened).search(opened.float_keys(slice(start, start + 32)), 4)
    for time, row in enumerate(found.entries.tolist()):
        kept = [entry for entry in row if entry != start + time][:3]
        assert batch.neighbours[2, time].tolist() == opened.tokens[kept].tolist()
    halves = [data.batch(5, rank, 2).neighbours for rank in range(2)]
    assert torch.equal(torch.cat(halves), batch.neighbours)
    keys = KeyedDecoder(kinformer.load(gpt_run))
    table = data.neighbours["validation"]
    windows = corpus.splits["validation"].rows(np.array([0, 64]), 32)
    with torch.inference_mode():
        wanted = ExactSearch(opened).search(keys(torch.from_numpy(windows))[0].keys.flatten(0, 1), 3).tokens
    assert np.array_equal(np.concatenate([table[:32], table[64:96]]), wanted.numpy())
    whole = list(data.validation(0, 1))
    parts = [list(data.validation(rank, 3)) for rank in range(3)]
    for index, batch in enumerate(whole):
        assert batch.neighbours.shape[:2] == (batch.tokens.shape[0], batch.tokens.shape[1] - 1)
        place = int(data.stream.starts[0]) + index * 32
        assert np.array_equal(batch.neighbours[0], table[place : place + batch.neighbours.shape[1]])
        joined = torch.cat([part[index].neighbours for part in parts])[: len(batch.neighbours)]
        assert torch.equal(joined, batch.neighbours)


def test_a_killed_run_is_resumed_to_the_same_weights(cli, text_file, linear_run, carried, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done(cli, *train(text_file, whole, carried, linear_run, "--segments"))
    done(cli, *train(text_file, cut, carried, linear_run, "--segments", "--checkpoint-every", 3))
    shutil.rmtree(cut / "checkpoints" / sorted(path.name for path in (cut / "checkpoints").iterdir())[-1])
    moved = tmp_path / "moved"
    carried.rename(moved)
    resumed = ("train", "spalm", "--out", cut, "--resume")
    assert "is not a datastore" in refused(cli, *resumed, "--threads", 1)
    assert "keeps its settings" in refused(cli, *resumed, "--neighbours", 9)
    done(cli, *resumed, "--datastore", moved, "--threads", 1)
    theirs, ours = open_run(whole).model().state_dict(), open_run(cut).model().state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())
    assert float(theirs["head.gate.weight"].abs().max()) > 0
    assert open_run(cut).data["retrieval"]["datastore"] == str(moved)
    told, _ = done(cli, "evaluate", cut, "--first", 100, "--json")
    assert told["carried"] and told["datastore"] == str(moved)


def test_looks_into_lists_where_there_are_some(cli, text_file, gpt_run, store, tmp_path):
    """As in the README: an index with lists, and no word of probes. What was chosen is told and kept."""
    pytest.importorskip("faiss")
    store = shutil.copytree(store, tmp_path / "store")
    done(cli, "index", gpt_run, "--datastore", store, "--approximate", "--lists", 20)
    _, err = done(cli, *train(text_file, tmp_path / "run", store, gpt_run))
    assert err.count("neighbours of every token are looked up approximately, in 8 of the datastore's lists") == 1
    assert re.search(r"as many: [\d,]+ tokens, about [\d.]+ minutes", err), (
        "it says how long that takes before it begins"
    )
    assert open_run(tmp_path / "run").data["retrieval"]["probes"] == 8
    assert "keeps its settings" in refused(cli, "train", "spalm", "--out", tmp_path / "run", "--resume", "--probes", 0)


def test_evaluate_finds_what_it_was_trained_with(cli, spalm_run, gpt_run, store):
    told, err = done(cli, "evaluate", spalm_run, "--json")
    assert (told["datastore"], told["neighbours"], told["context"]) == (str(store), 3, 32) and "note" not in err
    run = open_run(spalm_run)
    assert run.data["retrieval"]["probes"] is None
    model, split = run.model(), open_corpus(run.data["spec"]).splits["test"]
    windows = Windows(context=32)
    alone = measure(model, split, windows).bits_per_byte
    with_store = attach_store(run, model, open_run)
    assert told["bits_per_byte"] == measure(with_store, split, windows).bits_per_byte != alone
    text, _ = done(cli, "evaluate", spalm_run, "--neighbours", 5, "--datastore", store)
    assert f"5 neighbours of each token among the {told['entries']:,} entries of {store}" in text
    _, err = done(cli, "evaluate", spalm_run, "--split", "train", "--first", 100)
    assert "is in the datastore itself" in err


def test_generation_looks_things_up(cli, spalm_run, store):
    options = ("--prompt", "wind tree", "--max-new-tokens", 8, "--seed", 1, "--json")
    told, _ = done(cli, "generate", spalm_run, *options)
    assert len(told["samples"][0]["tokens"]) == 8
    model = kinformer.load(spalm_run)
    prompt = torch.tensor([list(b"wind tree")])
    new = kinformer.generate(model, prompt, max_new_tokens=8, seed=1)
    assert new[0].tolist() == told["samples"][0]["tokens"]


def test_without_a_store_the_base_is_trained_and_that_is_told(cli, text_file, tmp_path):
    out = tmp_path / "run"
    _, err = done(cli, "train", "spalm", *TINY, "--data", text_file, "--out", out)
    assert "without its long-term memory" in err
    told, _ = done(cli, "evaluate", out, "--first", 100, "--json")
    assert "datastore" not in told


def test_foreign_stores_and_retrievers_are_refused(cli, text_file, gpt_run, linear_run, store, tmp_path):
    out = tmp_path / "run"

    def told(*arguments, data=text_file, retriever=gpt_run, folder=store):
        err = refused(cli, *train(data, out, folder, retriever, *arguments))
        assert not out.exists()
        return err

    assert "belongs to another model" in told(retriever=linear_run)
    assert "is not a datastore (it lacks store.json)" in told(folder=tmp_path / "nothing")
    assert "is not a run folder" in told(retriever=tmp_path / "nothing")
    assert "it holds another part of it" in (said := told("--holdout", 0.2)) and "--holdout 0.2" in said
    other = tmp_path / "other.txt"
    other.write_text("It was another text altogether. " * 100)
    assert "it holds other data" in told(data=other)
    done(cli, "index", gpt_run, "--datastore", tmp_path / "all", "--split", "all")
    assert "it holds another part of it" in told(folder=tmp_path / "all")
    assert "looks nothing up" in told("--objective", "deep-supervision")
    assert "grows with every token" in told("--segments")
    assert "neighbours is 0" in told("--neighbours", 0)
    train_gpt = ("train", "gpt", *TINY, "--data", text_file, "--out", out)
    assert "looks nothing up while it is trained" in refused(cli, *train_gpt, "--datastore", store)
    assert "give --retriever RUN" in refused(
        cli, "train", "spalm", *TINY, "--data", text_file, "--out", out, "--datastore", store
    )
    assert "give --datastore FOLDER too" in refused(
        cli, "train", "spalm", *TINY, "--data", text_file, "--out", out, "--retriever", gpt_run
    )


def test_a_run_reads_with_the_tokenizer_of_its_retriever(cli, text_file, tokenized_run, tmp_path):
    """The documented lines hold whatever tokenizer the retriever has."""
    store, out = tmp_path / "store", tmp_path / "run"
    done(cli, "index", tokenized_run, "--data", text_file, "--split", "train", "--datastore", store)
    err = refused(cli, *train(text_file, out, store, tokenized_run, "--tokenizer", "bytes", "--device", "cpu"))
    assert "holds the tokens of another tokenizer" in err and "leave --tokenizer" in err
    done(cli, *train(text_file, out, store, tokenized_run))
    assert open_run(out).tokenizer.fingerprint == open_run(tokenized_run).tokenizer.fingerprint
    told, _ = done(cli, "evaluate", out, "--first", 100, "--json")
    assert told["datastore"] == str(store)


def test_minutes_choose_no_vocabulary_beside_a_retriever():
    options = TrainOptions(member="spalm", data="book.txt", out="out", minutes=5, retriever="runs/book")
    assert with_vocabulary(options, task_for(None, configure("spalm"), "spalm"), pytest.fail) is options


def test_what_a_trained_run_cannot_use_is_refused(cli, spalm_run, gpt_run, store):
    options = ("evaluate", spalm_run, "--datastore", store)
    assert "--weight: is for kNN-LM" in refused(cli, *options, "--weight", 0.5)
    moved = store.rename(store.with_name("moved"))
    for command in (("evaluate", spalm_run), ("generate", spalm_run, "--prompt", "x")):
        assert "is not a datastore" in refused(cli, *command)
    moved.rename(store)


def test_a_head_says_by_its_type_that_it_looks_things_up():
    class Strange(NeedsStore, HeadConfig):
        kind = "strange"

    assert looks_up(SimpleNamespace(head=Strange())) and looks_up(configure("spalm", "tiny"))
    assert not looks_up(configure("gpt", "tiny")) and not looks_up(configure("vanilla", "tiny"))
