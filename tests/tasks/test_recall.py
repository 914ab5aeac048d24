"""The task recall: trained, measured and asked, from Python and from the command line."""

import json

import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.data.mqar import Recall
from kinformer.lab.tasks.answers import ScoredBatch, answers
from kinformer.lab.tasks.recall import RecallLoss, accuracy_of
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL

SMALL = {"task": "recall", "recipe": "tiny", "length": 24, "batch_size": 4, "steps": 2, "threads": 1, "device": "cpu"}
SMALL |= {"pairs": "2,6", "symbols": 30, "quiet": True}


class Knowing(torch.nn.Module):
    """A model that looks up what stood behind the token when it came first."""

    def head_inputs(self, tokens, state=None, *, valid=None):
        same = (tokens[:, :, None] == tokens[:, None, :-1]) & torch.ones(24, 23, dtype=torch.bool).tril(-1)
        first = same.int().argmax(-1)
        return tokens.gather(1, first + 1), None

    def logits(self, inputs):
        return torch.nn.functional.one_hot(inputs, 30).float() * 50


def test_the_objective_counts_queries_by_their_pairs():
    rows = Recall(pairs=(2, 6), symbols=30, random_fillers=False).rows("test", 0, 40, 24)
    batch = ScoredBatch.of(rows)
    loss, metrics, _ = RecallLoss((2, 6))(Knowing(), batch, None, 0.0)
    asked = {number: int((rows.pairs == number).sum()) * number for number in (2, 6)}
    assert loss < 1e-6 and {number: int(metrics[f"asked_{number}"]) for number in (2, 6)} == asked
    assert int(metrics["correct"]) == int(metrics["predicted"]) == sum(asked.values())
    wrong = torch.where((batch.labels >= 0) & (batch.sizes[:, None] == 6), batch.labels - 1, batch.labels)
    metrics = RecallLoss((2, 6))(Knowing(), batch._replace(labels=wrong), None, 0.0)[1]
    assert (int(metrics["correct_2"]), int(metrics["correct_6"])) == (asked[2], 0)


def test_only_queries_are_scored():
    model = kinformer.build("gpt", recipe="tiny", vocab_size=30)
    batch = ScoredBatch.of(Recall(pairs=(2, 6), symbols=30).rows("test", 0, 5, 24))
    logits, labels, rows, _ = answers(model, batch)
    whole = model(batch.tokens)[0]
    asked = batch.labels >= 0
    assert torch.allclose(logits, whole[asked], atol=1e-5) and torch.equal(labels, batch.labels[asked])
    assert batch.sizes[rows].tolist() == [int(n) for n in batch.sizes for _ in range(int(n))]


def test_from_the_command_line(run_cli, tmp_path):
    out = tmp_path / "run"
    flags = ["--task", "recall", "--recipe", "tiny", "--length", 24, "--batch-size", 4, "--steps", 2, "--threads", 1]
    told = json.loads(run_cli("train", "gpt", *flags, "--pairs", "2,6", "--symbols", 30, "--out", out, "--json"))
    assert told["steps"] == 2 and 0 <= told["validation_accuracy"] <= 1
    config = json.loads((out / "config.json").read_text())
    assert config["task"]["options"]["pairs"] == "2,6" and config["model"]["input"]["vocab_size"] == 30
    measured = json.loads(run_cli("evaluate", out, "--rows", 8, "--json"))
    assert measured["guessing"] == 2 / 8 and [each["queries"] for each in measured["by_pairs"]] == [16, 48]
    assert measured["accuracy_of_6_pairs"] == measured["by_pairs"][1]["accuracy"]
    assert "4      24       12" in run_cli("evaluate", out, "--at-pairs", "4", "--rows", 3)
    answer = json.loads(run_cli("generate", out, "--prompt", "3 20 5 21 3", "--json"))
    assert 0 <= int(answer["samples"][0]["text"]) < 30 and answer["prompt_tokens"] == 5
    assert run_cli("generate", out, "--prompt", "3 20 3").startswith("3 20 3 ")


def test_from_python(tmp_path):
    run = kinformer.train("linear-transformer", out=tmp_path / "run", **SMALL)
    assert (run.task.name, run.options.pairs, run.tokenizer) == ("recall", "2,6", None)
    found = kinformer.evaluate(tmp_path / "run", rows=4)
    assert found.units[2:] == (accuracy_of(2), accuracy_of(6)) and not found.units[2].lower_is_better
    assert found.baselines["guessing"] == 0.25
    same = kinformer.evaluate(tmp_path / "run", rows=4)
    assert same.metrics == found.metrics
    chunked = kinformer.evaluate(tmp_path / "run", rows=4, chunk=48)
    assert chunked.metrics == pytest.approx(found.metrics, rel=1e-5)


@pytest.mark.parametrize("member", CAUSAL)
def test_every_causal_member_can(member):
    model = kinformer.build(member, recipe="tiny", vocab_size=30)
    batch = ScoredBatch.of(Recall(pairs=(2, 6), symbols=30).rows("train", 0, 3, 24))
    loss, _, _ = RecallLoss((2, 6))(model, batch, None, 0.0)
    loss.backward()
    assert loss.isfinite() and any(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pairs": "8,x"}, "pairs 8,x: does not list numbers of pairs; write as in 4,8,16"),
        ({"pairs": "7"}, "length 24: 7 pairs and as many queries take 28 tokens"),
        ({"symbols": 12}, "6 pairs must have a key each, but 12 symbols make 5 keys"),
        ({"symbols": 2}, "symbols"),
        ({"data": "x"}, "data x: recall makes its own rows"),
        ({"set": {"input.vocab_size": 20}}, 'input.vocab_size": 20'),
    ],
)
def test_mistakes(tmp_path, options, told):
    with pytest.raises(KinformerError) as error:
        kinformer.train("gpt", out=tmp_path / "run", **SMALL | options)
    assert told in str(error.value) and not (tmp_path / "run").exists()


def test_what_it_cannot_do_is_one_sentence(capsys, tmp_path):
    kinformer.train("gpt", out=tmp_path / "run", **SMALL)
    for arguments, told in (
        (("generate", tmp_path / "run", "--prompt", "3 x"), "the prompt holds 'x', but must be numbers of symbols"),
        (("generate", tmp_path / "run", "--prompt", "3", "--samples", "2"), "a key has one answer"),
        (("evaluate", tmp_path / "run", "--first", "9"), "recall makes its own rows"),
        (("evaluate", tmp_path / "run", "--at-pairs", "0"), "does not list numbers of pairs"),
    ):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1, err


def test_every_query_is_a_row_of_the_table(tmp_path):
    run = kinformer.train("gpt", out=tmp_path / "run", **SMALL).folder
    table = tmp_path / "queries.jsonl"
    evaluated = kinformer.evaluate(run, rows=5, predictions=str(table), quiet=True)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["item"] for row in rows] == list(range(1, 41)) and {row["pairs"] for row in rows} == {2, 6}
    assert sum(row["label"] == row["value"] for row in rows) / 40 == pytest.approx(evaluated.figures["accuracy"])
    for pairs in (2, 6):
        made = Recall(pairs=(2, 6), symbols=30).rows("test", 0, 5, 24, 0, (pairs,))
        asked = made.labels >= 0
        mine = [row for row in rows if row["pairs"] == pairs]
        assert [row["key"] for row in mine] == made.tokens[asked].tolist()
        assert [row["label"] for row in mine] == made.labels[asked].tolist()
        assert [row["row"] for row in mine] == [row + 1 for row in range(5) for _ in range(pairs)]
