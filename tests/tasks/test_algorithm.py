"""The task algorithm: its problems, what counts as solved, and a run from the command line."""

import json

import numpy as np
import pytest
import torch

import kinformer
from kinformer.lab.data.algorithms import ALGORITHMS, END, SYMBOLS, AlgorithmData, carried
from kinformer.lab.evaluation.depths import noting_depths, noting_exits
from kinformer.lab.tasks.algorithm import AlgorithmLoss, ByDifficulty, solved
from kinformer.lab.tasks.answers import ScoredBatch, answers
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL

SMALL = {"task": "algorithm", "recipe": "tiny", "length": 32, "batch_size": 4, "steps": 2, "threads": 1}
SMALL |= {"device": "cpu", "digits": "1-4", "validation_tokens": 32, "quiet": True}


def value(digits):
    return int(digits[::-1])


ANSWERS = {
    "copy": lambda problem: problem,
    "reverse": lambda problem: problem[::-1],
    "parity": lambda problem: str(problem.count("1") % 2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows_hold_problems_and_their_answers(name):
    data = AlgorithmData(algorithm=name, least=2, most=7)
    rows, lengths = data.rows("train", 3, 60), set()
    assert rows.tokens.shape == (60, data.width())
    for tokens, labels, digits, valid in zip(*rows, strict=True):
        text = "".join(SYMBOLS[token] for token in tokens[valid])
        problem, answer = text.split("=")
        told = "".join(SYMBOLS[label] for label in labels[labels >= 0])
        assert told == f"{answer}." and labels[valid][-1] == END and (tokens[~valid] == END).all()
        assert all(len(number) == digits for number in problem.split("+"))
        if name == "addition":
            assert value(answer) == sum(map(value, problem.split("+"))) and (len(answer) == digits or answer[-1] == "1")
        else:
            assert answer == ANSWERS[name](problem)
        lengths.add(int(digits))
    assert lengths == set(range(2, 8))
    again, other = data.rows("train", 3, 60), data.rows("test", 3, 60)
    assert (again.tokens == rows.tokens).all() and not (other.tokens == rows.tokens).all()


class Copying(torch.nn.Module):
    """Knows answers of a copy of 3 digits, except for those of the last digit of row 0."""

    def head_inputs(self, tokens, state=None, *, valid=None):
        known = torch.cat([torch.full((len(tokens), 3), END), tokens[:, :3], torch.full((len(tokens), 1), END)], 1)
        known[0, 5] = (known[0, 5] + 1) % 10
        return known[:, : tokens.shape[1]], None

    def logits(self, inputs):
        return torch.nn.functional.one_hot(inputs, len(SYMBOLS)).float() * 50


def test_a_problem_is_solved_where_all_its_tokens_are_right():
    batch = ScoredBatch.of(AlgorithmData().rows("test", 0, 5, digits=3))
    _, metrics, _ = AlgorithmLoss()(Copying(), batch, None, 0.0)
    assert {name: int(count) for name, count in metrics.items() if name != "nats"} == {
        "predicted": 20,
        "correct": 19,
        "solved": 4,
        "problems": 5,
    }
    logits, labels, rows, _ = answers(Copying(), batch)
    assert solved(logits.argmax(-1) == labels, rows, 5).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("member", CAUSAL)
def test_every_causal_member_can(member):
    model = kinformer.build(member, recipe="tiny", vocab_size=len(SYMBOLS))
    batch = ScoredBatch.of(AlgorithmData(algorithm="addition", most=4).rows("train", 0, 3))
    loss, _, _ = AlgorithmLoss()(model, batch, None, 0.0)
    loss.backward()
    assert loss.isfinite() and any(weight.grad is not None for weight in model.parameters())


def test_from_the_command_line(run_cli, tmp_path):
    out = tmp_path / "run"
    flags = ["--recipe", "tiny", "--length", 32, "--batch-size", 4, "--steps", 2, "--threads", 1, "--digits", "1-4"]
    flags += ["--task", "algorithm", "--algorithm", "reverse", "--validation-tokens", 32, "--out", out]
    told = json.loads(run_cli("train", "universal", *flags, "--json"))
    assert told["steps"] == 2 and 0 <= told["validation_sequence_accuracy"] <= told["validation_accuracy"] <= 1
    config = json.loads((out / "config.json").read_text())
    assert config["task"]["options"]["algorithm"] == "reverse" and config["model"]["input"]["vocab_size"] == 13
    measured = json.loads(run_cli("evaluate", out, "--problems", 6, "--json"))
    assert [each["digits"] for each in measured["by_digits"]] == [1, 2, 4, 8, 16]
    assert [each["trained"] for each in measured["by_digits"]] == [True, True, True, False, False]
    assert [each["tokens"] for each in measured["by_digits"]] == [12, 18, 30, 54, 102]
    assert 1 <= measured["ponder_steps"] <= 3
    places = measured["by_digits"][2]["by_place"]
    assert [row["place"] for row in places] == [0, 1, 2, 3, 4] and all(row["tokens"] == 6 for row in places)
    assert all(1 <= row["ponder_steps"] <= 3 for row in places) and "by_carry" not in measured["by_digits"][2]
    assert measured["sequence_accuracy_at_8"] == measured["by_digits"][3]["sequence_accuracy"]
    assert "place in the answer" in run_cli("evaluate", out, "--at-digits", "3", "--problems", 3)
    answer = json.loads(run_cli("generate", out, "--prompt", "407=", "--json"))
    assert answer["prompt_tokens"] == 4 and set(answer["samples"][0]["text"]) <= set(SYMBOLS)


def test_carries_are_followed_through_nines():
    """185 + 815, and 950 + 159, the lowest digit first: 581+518=0001. and 059+951=9011."""
    tokens = np.array([[SYMBOLS.index(each) for each in row] for row in ("581+518=0001", "059+951=9011")])
    assert carried(tokens, 3).tolist() == [[0, 1, 2, 3, 0], [0, 0, 1, 1, 0]]


def test_how_deep_tokens_go_is_told_by_their_difficulty():
    """By the halting of two rows whose tokens take as many steps as this test says."""
    data = AlgorithmData(algorithm="addition", least=3, most=3)
    batch = ScoredBatch.of(data.rows("test", 0, 50, digits=3))
    model = kinformer.build("universal", recipe="tiny", vocab_size=len(SYMBOLS))
    with noting_depths(model) as depths, torch.no_grad():
        by = ByDifficulty("addition", 3, depths)
        right = answers(model, batch).right
        assert torch.equal(depths.last > 0, batch.valid)
        arrived = torch.from_numpy(carried(batch.tokens.numpy(), 3))
        place = (batch.scored.cumsum(1) - 1).clamp_min(0)
        depths.last = torch.where(batch.valid, 1 + arrived.gather(1, place), 0)
        by.note(batch, right)
    carries = by.facts["by_carry"]
    assert [row["ponder_steps"] for row in carries] == [1 + row["carry"] for row in carries] and len(carries) > 2
    assert sum(row["tokens"] for row in carries) == sum(row["tokens"] for row in by.facts["by_place"]) == len(right)
    assert sum(row["accuracy"] * row["tokens"] for row in carries) == pytest.approx(int(right.sum()))


def test_layers_of_tokens_that_leave_early():
    model = kinformer.build("calm", recipe="tiny", vocab_size=len(SYMBOLS), set={"stack.rule.thresholds": [0.05]})
    model, batch = model.eval(), ScoredBatch.of(AlgorithmData(most=4).rows("test", 0, 9))
    with noting_depths(model) as depths, noting_exits(model) as exits, torch.no_grad():
        answers(model, batch)
    assert float(depths.last[batch.valid].double().mean()) == pytest.approx(exits.result.layers_per_token)
    assert not depths.last[~batch.valid].any() and depths.metric.name == "layers_per_token"
    with noting_depths(kinformer.build("gpt", recipe="tiny")) as depths:
        assert depths is None


def test_positions_that_end_are_left_out(tmp_path):
    changes = {"position.max_length": 32}
    kinformer.train("gpt", out=tmp_path / "run", set=changes, algorithm="parity", **SMALL | {"digits": "8"})
    found = kinformer.evaluate(tmp_path / "run", problems=4)
    assert [each["digits"] for each in found.facts["by_digits"]] == [8, 16] and "ponder_steps" not in found.metrics
    assert found.baselines["most_frequent_token"] >= 0.5
    with pytest.raises(KinformerError, match="at_digits 99: takes rows of 101 tokens"):
        kinformer.evaluate(tmp_path / "run", at_digits="99")
    for prompt in ("407", "4x=", ""):
        with pytest.raises(KinformerError, match="is not a problem: it must hold digits"):
            main_generate(tmp_path / "run", prompt)


def main_generate(folder, prompt):
    from kinformer.lab.tasks.algorithm import generate
    from kinformer.lab.tasks.evaluation import GenerationSettings, LoadedRun

    run = kinformer.open_run(folder)
    return generate(LoadedRun(run, run.model()), prompt, GenerationSettings())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"digits": "5-x"}, "digits 5-x: is not a range of numbers from 1; write as in 1-20"),
        ({"digits": "5-3"}, "digits 5-3: is not a range"),
        ({"digits": "0-3"}, "digits 0-3: is not a range"),
        ({"digits": "1-20"}, "length 32: problems of 20 digits take 41 tokens"),
        ({"algorithm": "sort"}, "sort"),
        ({"data": "x"}, "data x: an algorithm makes its own problems"),
    ],
)
def test_mistakes(tmp_path, options, told):
    with pytest.raises(KinformerError) as error:
        kinformer.train("gpt", out=tmp_path / "run", **SMALL | options)
    assert told in str(error.value) and not (tmp_path / "run").exists()


def test_every_problem_is_a_row_of_the_table(tmp_path):
    run = kinformer.train("gpt", out=tmp_path / "run", algorithm="reverse", **SMALL).folder
    table = tmp_path / "problems.jsonl"
    figures = kinformer.evaluate(run, at_digits="2,4", problems=6, predictions=str(table), quiet=True).figures
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["digits"] for row in rows] == [2] * 6 + [4] * 6
    assert all(row["label"] == row["text"][-2::-1] for row in rows)
    assert all(row["solved"] == (row["label"] == row["answer"]) for row in rows)
    assert sum(row["solved"] for row in rows) / 12 == figures["sequence_accuracy"]
