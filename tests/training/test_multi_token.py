"""Several tokens ahead: the objective by closed form, what it is refused for, and that it learns."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from kinformer.family.build import build
from kinformer.lab.cli.main import main
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.next_token import MultiToken, NextTokenLoss, TokenBatch
from kinformer.lab.tasks.table import TASKS
from kinformer.runtime.errors import KinformerError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build("linear-transformer", "tiny", 23, {"ahead": 2})


def ahead(model, tokens, place, number):
    """Minus the log-probability of the token ``number`` + 1 places behind ``place`` of a row, token by token."""
    z = model.hidden(tokens[None, : place + 1])[0][:, -1:]
    for step in range(1, number + 1):
        z = model.ahead.further(step, z, tokens[None, place + step : place + step + 1], model.input)
    return cross_entropy(model.logits(z)[0], tokens[None, place + number + 1]).item()


def test_loss_by_closed_form(model):
    tokens = torch.randint(23, (2, 9))
    loss, metrics, _ = MultiToken.of(model)(model, TokenBatch(tokens), None, 0.3)
    plain, expected, _ = NextTokenLoss()(model, TokenBatch(tokens), None, 0.3)
    further = [
        sum(ahead(model, row, place, number) for row in tokens for place in range(8 - number)) / (2 * (8 - number))
        for number in (1, 2)
    ]
    assert loss.item() == pytest.approx(plain.item() + 0.3 * sum(further) / 2, rel=1e-5)
    assert torch.equal(metrics["nats"], expected["nats"])
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    got, want = (each(model.eval(), TokenBatch(tokens), None, 0.0)[0] for each in (MultiToken(), NextTokenLoss()))
    assert torch.equal(got, want)


def test_nothing_is_predicted_across_documents_or_padding(model):
    tokens = torch.randint(23, (1, 12))
    reset, valid = torch.zeros(1, 11, dtype=torch.bool), torch.ones(1, 11, dtype=torch.bool)
    reset[0, 5], valid[0, 9:] = True, False
    batch = TokenBatch(tokens, reset, valid)
    hidden = model.hidden(tokens[:, :-1], valid=valid, reset=reset)[0]
    parts = (tokens[0, :6], tokens[0, 5:10])
    for number, loss in enumerate(MultiToken().further(model, hidden, batch), start=1):
        terms = [ahead(model, part, place, number) for part in parts for place in range(len(part) - 1 - number)]
        assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_a_row_shorter_than_what_is_predicted_has_no_further_loss(model):
    tokens = torch.randint(23, (2, 2))
    further = MultiToken().further(model, model.hidden(tokens[:, :-1])[0], TokenBatch(tokens))
    assert further.tolist() == [0.0, 0.0]


def test_the_losses_of_further_tokens_fall(model):
    text = torch.tensor([(7 * n * n + 3 * n) % 23 for n in range(47)]).repeat(3)
    rows = text.unfold(0, 24, 5)
    optimizer, objective = torch.optim.Adam(model.parameters(), lr=3e-3), MultiToken.of(model)
    further = []
    for _ in range(60):
        loss, _, _ = objective(model, TokenBatch(rows), None, 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hidden = model.hidden(rows[:, :-1])[0]
        further.append(objective.further(model, hidden, TokenBatch(rows)).detach())
    assert (further[0] > 2.5).all() and (further[-1] < 0.4 * further[0]).all()


def test_further_tokens_and_their_objective_need_each_other(tmp_path):
    with pytest.raises(KinformerError, match="the objective 'multi-token' needs a model that predicts further tokens"):
        TASKS["next-token"].objective("multi-token", build("gpt", "tiny"))
    for changes in ({"ahead": -1}, {"ahead": 1, "input": {"kind": "pixels"}, "head": {"kind": "logistics"}}):
        with pytest.raises(KinformerError, match="ahead"):
            build("image-transformer", "tiny", None, changes)


def test_a_run_learns_and_drafts_by_it(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the wind is in the reeds, and the reeds are in the wind. " * 60)
    command = f"train gpt --recipe tiny --data {text} --holdout 0.2 --steps 30 --length 32 --batch-size 4 --device cpu"
    command += " --lr 0.003 --quiet --seed 0"
    assert main([*command.split(), "--set", "ahead=2", "--out", str(tmp_path / "wrong")]) == 2
    assert "does not train the weights of --set ahead; give --objective multi-token" in capsys.readouterr().err
    folder = tmp_path / "run"
    assert main([*command.split(), "--set", "ahead=2", "--objective", "multi-token", "--out", str(folder)]) == 0
    assert len(open_run(folder).model().ahead) == 2
    capsys.readouterr()
    options = ["--prompt", "the wind", "--max-new-tokens", "40", "--seed", "1", "--device", "cpu"]
    assert main(["generate", str(folder), *options]) == 0
    plain = capsys.readouterr().out
    for draft in ("mtp", "ngram", str(folder)):
        assert main(["generate", str(folder), *options, "--draft", draft]) == 0
        told = capsys.readouterr()
        assert told.out == plain and "tokens a pass of the model" in told.err
