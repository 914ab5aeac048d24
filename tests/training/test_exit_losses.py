"""The losses of all exits by closed form, drawn exits, and what the exit classifier learns."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.lab.tasks.next_token import ExitLosses, TokenBatch
from kinformer.runtime.errors import KinformerError

TOKENS = torch.randint(23, (4, 13), generator=torch.Generator().manual_seed(0))


def build(**changes):
    torch.manual_seed(0)
    return kinformer.build("calm", recipe="tiny", vocab_size=23, set=changes).train()


def losses(model):
    """The mean cross-entropy of every exit."""
    _, _, tapped = model.hidden(TOKENS[:, :-1], taps=model.stack.exits)
    logits = [model.head(model.norm(x), model.input) for x in tapped]
    return torch.stack([cross_entropy(each.flatten(0, 1), TOKENS[:, 1:].flatten()) for each in logits])


@pytest.mark.parametrize(
    ("weights", "want"), [("linear", (1.0, 2.0, 3.0)), ("uniform", (1.0, 1.0, 1.0)), ("powers", (1.0, 2.0, 4.0))]
)
def test_the_loss_is_a_weighted_mean_of_all_exits(weights, want):
    model = build(**{"stack.weights": weights})
    found, metrics, _ = ExitLosses.of(model)(model, TokenBatch(TOKENS), None, 0.0)
    each, want = losses(model), torch.tensor(want)
    assert torch.allclose(found, (each * want).sum() / want.sum())
    assert (
        float(metrics["nats"]) == pytest.approx(48 * float(each[-1].detach()), rel=1e-5) and metrics["predicted"] == 48
    )


def test_padding_does_not_count():
    model = build()
    valid = torch.arange(12) < torch.tensor([[12], [5], [12], [5]])
    spoilt = TOKENS.clone()
    spoilt[1::2, 6:] = 7
    one, two = (ExitLosses()(model, TokenBatch(tokens, None, valid), None, 0.0) for tokens in (TOKENS, spoilt))
    assert torch.allclose(one[0], two[0]) and one[1]["predicted"] == 34


def test_mixed_training_is_the_mean_of_runs_with_drawn_exits():
    model = build(**{"stack.training": "mixed", "stack.samples": 3})
    objective = ExitLosses.of(model)
    torch.manual_seed(3)
    found, metrics, _ = objective(model, TokenBatch(TOKENS), None, 0.0)
    torch.manual_seed(3)
    each = [cross_entropy(model(TOKENS[:, :-1])[0].flatten(0, 1), TOKENS[:, 1:].flatten()) for _ in range(3)]
    assert len({float(one.detach()) for one in each}) == 3 and torch.allclose(found, torch.stack(each).mean())
    assert float(metrics["nats"]) == pytest.approx(48 * float(torch.stack(each).mean().detach()), rel=1e-5)


def test_the_classifier_learns_where_exits_agree_and_moves_nothing_else():
    """Its loss by a loop over exits and tokens, each answer weighing a half; the model's gradients are as without."""
    model, plain = build(**{"stack.rule": "classifier"}), build()
    plain.load_state_dict({name: w for name, w in model.state_dict().items() if "rule" not in name})
    batch = TokenBatch(TOKENS)
    found, without = (ExitLosses()(each, batch, None, 0.0)[0] for each in (model, plain))
    _, _, tapped = model.hidden(TOKENS[:, :-1], taps=model.stack.exits)
    best = [model.exit_logits(x, number).argmax(-1).flatten() for number, x in enumerate(tapped)]
    want = 0.0
    for x, own in zip(tapped[:-1], best, strict=False):
        p = model.stack.rule.linear(x.flatten(0, 1))[:, 0].sigmoid()
        halves = [-p[own == best[-1]].log(), -(1 - p[own != best[-1]]).log()]
        want = want + sum(0.5 * half.mean() for half in halves if len(half)) / 2
    assert torch.allclose(found - without, want, atol=1e-5)
    found.backward()
    without.backward()
    assert float(model.stack.rule.linear.weight.grad.abs().max()) > 0
    for name, weight in plain.named_parameters():
        assert torch.allclose(weight.grad, model.get_parameter(name).grad, atol=1e-6)


def test_it_is_the_objective_of_calm_and_refused_elsewhere(tmp_path, text_file):
    with pytest.raises(KinformerError, match="needs a model whose tokens may leave early"):
        ExitLosses.of(kinformer.build("gpt", recipe="tiny"))
    run = kinformer.train(
        "calm", recipe="tiny", out=tmp_path / "run", data=text_file, steps=2, batch_size=2, length=16, device="cpu"
    )
    assert run.training["objective"] == "exits" and run.metrics["bits_per_byte"] > 0
    with pytest.raises(KinformerError, match="mixed training takes one"):
        kinformer.build("calm", recipe="tiny", set={"stack.training": "mixed", "stack.rule": "classifier"})
