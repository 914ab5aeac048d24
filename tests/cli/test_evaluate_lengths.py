"""``kinformer evaluate``: several lengths, several runs, pictures, and the effective context length of a group."""

import json

import numpy as np
import pytest

from kinformer.lab.data import open_corpus
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.evaluation.recl import context_losses, recl, spread_positions


def metrics(cli, *arguments):
    code, out, err = cli("evaluate", *arguments, "--json", "--device", "cpu", "--first", 500)
    assert code == 0, err
    return json.loads(out), err


def test_multiples_of_the_training_length(cli, linear_run, text_file, load):
    told, _ = metrics(cli, linear_run, "--contexts", "1x, 4x,16")
    assert [each["context"] for each in told["lengths"]] == [32, 128, 16]
    assert told["lengths"][0]["bits_per_byte"] == told["bits_per_byte"]
    split = open_corpus(str(text_file)).splits["test"].take(500)
    expected = measure(load(linear_run), split, Windows(context=128))
    assert told["lengths"][1]["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    places = told["lengths"][1]["by_position"]
    assert [each["last"] for each in places] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sum(each["tokens"] for each in places) == 499


def test_lengths_beyond_the_positions_are_left_out(cli, gpt_run):
    told, _ = metrics(cli, gpt_run, "--contexts", "1x,4x,8x")
    assert [each["context"] for each in told["lengths"]] == [32, 128] and told["not_possible"] == [256]
    code, out, err = cli("evaluate", gpt_run, "--contexts", "1x,8x", "--first", 500)
    assert code == 0 and "not measured at 256, beyond its positions" in err
    assert ["256", "-"] in [line.split() for line in out.splitlines()]
    code, out, err = cli("evaluate", gpt_run, "--contexts", "8x,16x")
    assert (code, out) == (2, "") and "a context of 256 tokens is beyond this model's positions" in err


def test_several_runs_stand_side_by_side(cli, gpt_run, linear_run):
    alone, _ = metrics(cli, linear_run, "--contexts", "16")
    told, _ = metrics(cli, gpt_run, linear_run, "--contexts", "16")
    assert [each["member"] for each in told["runs"]] == ["gpt", "linear-transformer"]
    assert told["runs"][1]["lengths"] == alone["lengths"]
    code, out, _ = cli("evaluate", gpt_run, linear_run, "--contexts", "8x", "--context", 16, "--first", 500)
    assert code == 2
    code, out, _ = cli("evaluate", gpt_run, linear_run, "--contexts", "1x,8x", "--first", 500)
    table = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert table[0] == ["context", "gpt", "linear-transformer"]
    assert [row[0] for row in table[1:]] == ["32", "256"] and table[2][1] == "-"
    assert "bits per byte by position in the window, gpt" in out


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("b.svg", b"<?xml")])
def test_pictures(cli, gpt_run, linear_run, tmp_path, name, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    _, err = metrics(cli, gpt_run, linear_run, "--contexts", "1x,2x,8x", "--plot", path)
    assert path.read_bytes().startswith(start) and "drew" in err
    metrics(cli, gpt_run, linear_run, "--recl", "--plot", path, "--positions", 9)
    assert path.read_bytes().startswith(start)


def test_the_effective_context_length_of_a_group(cli, gpt_run, linear_run, text_file, load):
    arguments = ("--contexts", "8,16,32", "--hardest", 0.5, "--positions", 20)
    told, _ = metrics(cli, gpt_run, linear_run, "--recl", *arguments)
    split = open_corpus(str(text_file)).splits["test"].take(500)
    positions = spread_positions(split, 32, 20)
    losses = [context_losses(load(run), split, [8, 16, 32], positions) for run in (gpt_run, linear_run)]
    for one, expected in zip(told["runs"], recl(np.stack(losses), [8, 16, 32], hardest=0.5), strict=True):
        assert (one["recl"], one["at_least"]) == (expected.length, expected.at_least)
        assert one["gains"] == pytest.approx(expected.gains, abs=1e-5)
    assert told["contexts"] == [8, 16, 32] and told["tokens"] == 20
    code, out, _ = cli("evaluate", gpt_run, linear_run, "--recl", *arguments, "--first", 500)
    assert code == 0 and out.splitlines()[2].split() == ["run", "RECL", "8", "to", "16", "16", "to", "32"]
    assert metrics(cli, gpt_run, "--recl", "--positions", 5)[0]["contexts"] == list(range(8, 65, 8))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--contexts", "4y"], "--contexts 4y: is not a list of whole numbers; write as in 128,512,2k, or as in 1x,4x"),
        (["--plot", "a.png"], "--plot a.png: draws what --contexts measures; add --contexts 1x,2x,4x"),
        (["--contexts", "1x", "--plot", "a.pdf"], "a.pdf: a figure's name ends in .png or .svg"),
        (["--recl", "--contexts", "32"], "the contexts 32 cannot give an effective context length"),
        (["--recl", "--hardest", "0"], "--hardest is 0 but must be above 0"),
        (["--recl", "--positions", "0"], "--positions is 0 but must be 1 or more"),
        (["--recl", "--contexts", "1x,100x"], "a context of 3200 needs 3201"),
    ],
)
def test_mistakes_are_one_sentence(cli, gpt_run, arguments, told):
    code, out, err = cli("evaluate", gpt_run, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kinformer: ") and told in err and err.count("\n") == 1


def test_unlike_tokenizers_are_no_group(cli, gpt_run, tokenized_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, _, err = cli("evaluate", gpt_run, tokenized_run, "--recl")
    assert code == 2 and "have different tokenizers; measure them separately" in err


@pytest.mark.parametrize(
    ("member", "changes", "told"),
    [
        ("gpt", {}, True),
        ("linear-transformer", {}, True),
        ("rope", {}, True),
        ("alibi", {}, False),
        ("t5", {}, False),
        ("rope", {"layers.*.mixer.pattern": {"kind": "local", "window": 8}}, False),
    ],
)
def test_positions_that_were_never_trained_are_told(cli, make_run, member, changes, told):
    """The runs say that they were trained on rows of 32."""
    run = make_run(member, **changes)

    def tells(*words):
        code, _, err = cli(*words)
        assert code == 0, err
        return "never trained" in err

    assert tells("evaluate", run, "--context", 64, "--first", 200) == told
    assert tells("generate", run, "--prompt", "a", "--max-new-tokens", 40) == told
    assert not tells("evaluate", run, "--context", 32, "--first", 200)
    assert not tells("generate", run, "--prompt", "a", "--max-new-tokens", 32)
