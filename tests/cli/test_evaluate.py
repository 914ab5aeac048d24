"""``kinformer evaluate``: the figures of the library, on the right data, with clear notes."""

import io
import json
import sys
from dataclasses import replace

import pytest

from kinformer.lab.data import NgramModel, open_corpus
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.options import NextTokenOptions


def metrics(cli, *arguments):
    code, out, err = cli("evaluate", *arguments, "--json", "--device", "cpu")
    assert code == 0, err
    return json.loads(out), err


def test_a_constant_state_is_carried(cli, linear_run, text_file, load):
    told, err = metrics(cli, linear_run, "--context", "carried")
    corpus = open_corpus(str(text_file))
    expected = measure(load(linear_run), corpus.splits["test"])
    assert told["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert told["carried"] and told["context"] is None
    assert told["bytes"] == corpus.splits["test"].bytes == told["tokens"] + 1
    assert told["data"] == corpus.identity | {"split": "test", "same_as_run": True}
    assert told["ngram_bits_per_byte"] is None and told["lengths"] == [] and err == ""
    again, _ = metrics(cli, linear_run, "--chunk", 77, "--context", "carried")
    assert again["bits_per_byte"] == pytest.approx(told["bits_per_byte"], rel=1e-5)


def test_narrow_weights_are_measured_beside_wide_ones(cli, linear_run):
    wide, _ = metrics(cli, linear_run, "--first", 400)
    narrow, _ = metrics(cli, linear_run, "--first", 400, "--weights", "int8")
    assert narrow["weights"] == "int8" and narrow["fp32"]["bits_per_byte"] == wide["bits_per_byte"]
    # The run is hardly trained: a thousandth of its 11 bits is more than the 0.01 that a trained run may lose.
    assert 0 < abs(narrow["bits_per_byte"] - wide["bits_per_byte"]) < 0.001 * wide["bits_per_byte"]
    out = cli("evaluate", linear_run, "--first", 400, "--weights", "int8", "--device", "cpu")[1]
    assert f"int8 weights: {narrow['bits_per_byte']:.4f} bits per byte; fp32: {wide['bits_per_byte']:.4f}" in out
    code, _, err = cli("evaluate", linear_run, "--weights", "int8", "--datastore", "no/such")
    assert code == 2 and "--weights int8: does not go with --datastore" in err


def test_as_it_was_trained(cli, make_run, gpt_run):
    folder = make_run("linear-transformer")
    assert metrics(cli, folder)[0]["context"] == 32
    record = open_run(folder)
    replace(record, options=NextTokenOptions(segments=True)).save()
    assert metrics(cli, folder)[0]["carried"]
    code, _, err = cli("evaluate", gpt_run, "--context", "carried")
    assert code == 2 and "grows without bound" in err


def test_a_growing_state_is_measured_in_windows_of_the_training_length(cli, gpt_run, text_file, load):
    told, _ = metrics(cli, gpt_run, "--overlap", 0.5, "--split", "validation")
    split = open_corpus(str(text_file)).splits["validation"]
    expected = measure(load(gpt_run), split, Windows(context=32, overlap=0.5))
    assert told["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert (told["context"], told["overlap"], told["carried"]) == (32, 0.5, False)


def test_several_lengths_and_the_baseline(cli, linear_run, text_file, load):
    told, _ = metrics(cli, linear_run, "--contexts", "16,64", "--baseline", "--first", 400)
    corpus = open_corpus(str(text_file))
    split = corpus.splits["test"].take(400)
    assert told["bytes"] == 400
    for each, context in zip(told["lengths"], (16, 64), strict=True):
        expected = measure(load(linear_run), split, Windows(context=context))
        assert each["context"] == context
        assert each["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    expected = NgramModel(corpus.splits["train"], 4).bits_per_byte(split)
    assert told["ngram_bits_per_byte"] == pytest.approx(expected)


def test_the_text_form(cli, linear_run):
    code, out, err = cli(
        "evaluate", linear_run, "--contexts", "16,64", "--baseline", "--context", "carried", "--device", "cpu"
    )
    assert (code, err) == (0, "")
    assert "bits per byte: " in out and "state carried" in out and "by a 5-gram model" in out
    *_, lengths, positions, verdict = (section.splitlines() for section in out.split("\n\n"))
    assert [line.split()[0] for line in lengths] == ["context", "carried", "16", "64"]
    assert [line.split()[0] for line in positions[2:]] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64"]
    assert "is not better than" in verdict[-1]


def test_other_data_is_told(cli, linear_run, make_run, text_file, tmp_path, monkeypatch):
    other = tmp_path / "other.txt"
    other.write_text("quite another text\n" * 50)
    told, err = metrics(cli, linear_run, "--data", other)
    assert not told["data"]["same_as_run"]
    assert "note: other.txt is other data than the run was trained on" in err and "not comparable" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(other.read_bytes())))
    piped, _ = metrics(cli, linear_run, "--data", "-")
    assert piped["bits_per_byte"] == pytest.approx(told["bits_per_byte"], rel=1e-6)
    same, err = metrics(cli, linear_run, "--data", text_file)
    assert same["data"]["same_as_run"] and err == ""
    changed = make_run("linear-transformer", {"spec": str(text_file), "identity": {"fingerprint": "sha256:0000"}})
    assert "words.txt has changed since the run was trained" in metrics(cli, changed)[1]
    unknown = make_run("linear-transformer", {"spec": str(text_file), "identity": {}})
    assert "the run does not say what data it was trained on" in metrics(cli, unknown)[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--split", "tset"], "--split: 'tset' is unknown; did you mean 'test'"),
        (["--contexts", "16,many"], "--contexts 16,many: is not a list of whole numbers"),
        (
            ["--contexts", "129"],
            "a context of 129 tokens is beyond this model's positions, which end at max_length = 128",
        ),
        (["--context", "0"], "context is 0 but must be 1 or more"),
        (["--overlap", "1"], "overlap is 1 but must be at least 0 and below 1"),
        (["--data", "no/such/file"], "no/such/file does not exist"),
        (["--first", "1"], "holds 1 token but measuring in 1 stream needs 2"),
        (["--chunk", "0"], "--chunk is 0 but must be 1 or more"),
        (["--device", "quantum"], "--device quantum: cannot be used here"),
        (["--threads", "0"], "--threads is 0 but must be 1 or more"),
        (["--seed", "-1"], "--seed is -1 but must be 0 or more"),
        (["--seed", "3"], "--seed 3: nothing is drawn at random in an evaluation of this task; leave it out"),
        (["--hardest", "0.2"], "--hardest: says how --recl is measured; give --recl too"),
        (["--positions", "9"], "--positions: says how --recl is measured; give --recl too"),
        (["--recl", "--context", "8"], "--context: does not go together with --recl; leave one out"),
        (["--recl", "--baseline"], "--baseline: does not go together with --recl; leave one out"),
    ],
)
def test_mistakes_are_one_sentence(cli, gpt_run, arguments, told):
    code, out, err = cli("evaluate", gpt_run, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kinformer: ") and told in err and err.count("\n") == 1


def test_overlap_needs_windows(cli, linear_run):
    code, _, err = cli("evaluate", linear_run, "--overlap", 0.5, "--context", "carried")
    assert code == 2 and "the state is carried here; give --context N or --contexts too" in err


def test_damaged_weights_are_one_sentence(cli, make_run):
    folder = make_run("gpt")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    code, _, err = cli("evaluate", folder)
    assert code == 2 and "truncated or damaged" in err and err.count("\n") == 1


def test_bits_are_per_byte_of_text_with_a_tokenizer(cli, tokenized_run, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told, _ = metrics(cli, tokenized_run)
    assert told["bytes"] == open_corpus(str(text_file)).splits["test"].bytes > told["tokens"]
    part, _ = metrics(cli, tokenized_run, "--first", 500)
    assert part["bytes"] <= 500 or part["bytes"] == told["bytes"]
    assert told["bits_per_byte"] < told["bits_per_token"]
