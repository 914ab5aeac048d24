"""Relative effective context length: the definition on tables that are worked out by hand, and exact contexts."""

from math import exp, log
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kinformer.lab.evaluation.recl import context_losses, recl, relative_gains, spread_positions
from kinformer.lab.tasks import next_token_evaluation
from kinformer.lab.tasks.options import NextTokenEvaluationOptions
from kinformer.runtime.errors import KinformerError

from .conftest import tiny


def by_hand(losses, hardest):
    """The paper's formulas, one number at a time."""
    models, contexts, tokens = losses.shape
    gains = np.zeros((models, contexts - 1))
    for c in range(contexts - 1):
        baseline = [min(losses[i][c][t] for i in range(models)) for t in range(tokens)]
        order = sorted(range(tokens), key=lambda t: -baseline[t])[: max(1, round(hardest * tokens))]
        for i in range(models):
            short = exp(sum(min(baseline[t], losses[i][c][t]) for t in order) / len(order))
            long = exp(sum(min(baseline[t], losses[i][c + 1][t]) for t in order) / len(order))
            gains[i, c] = (short - long) / short
    return gains


@pytest.mark.parametrize("hardest", [0.1, 0.5, 1.0])
def test_gains_are_those_of_the_paper(hardest):
    losses = np.random.default_rng(0).exponential(2.0, (3, 5, 40))
    np.testing.assert_allclose(relative_gains(losses, hardest), by_hand(losses, hardest), rtol=1e-12, atol=1e-14)


def test_a_closed_form():
    """Losses that halve with every doubling: model 0 up to a context of 64, model 1 up to 128 but 1.5 times as large.

    The baseline is model 0 at every context up to 64 and model 1 at 128. Half of the tokens are easy (0.01 nats
    everywhere) and do not count.
    """
    contexts = [16, 32, 64, 128, 256]
    one = [4.0, 2.0, 1.0, 1.0, 1.0]
    two = [6.0, 3.0, 1.5, 0.75, 0.75]
    easy = [0.01] * 5
    losses = np.stack([np.stack([np.array([each, low]) for each, low in zip(model, easy)]) for model in (one, two)])
    first, second = recl(losses, contexts, hardest=0.5)
    assert (first.length, first.at_least) == (64, False)
    assert first.gains == pytest.approx([1 - exp(-2.0), 1 - exp(-1.0), 0.0, 0.0])
    assert (second.length, second.at_least) == (128, False)
    assert second.gains == pytest.approx([1 - exp(3.0 - 4.0), 1 - exp(1.5 - 2.0), 1 - exp(0.75 - 1.0), 0.0])
    alone = recl(losses[1:], contexts, hardest=0.5)[0]
    assert alone.gains == pytest.approx([1 - exp(-3.0), 1 - exp(-1.5), 1 - exp(-0.75), 0.0])


def test_the_threshold_is_a_hundredth_of_the_perplexity():
    base = 3.0
    for gain, length in ((0.0101, 20), (0.0099, 10)):
        losses = np.array([[[base], [base + log(1 - gain)], [base + log(1 - gain)]]])
        assert recl(losses, [10, 20, 30], hardest=1.0)[0].length == length


def test_a_gain_at_every_step_is_only_a_bound():
    losses = np.array([[[3.0], [2.0], [1.0]]])
    assert recl(losses, [10, 20, 30], hardest=1.0)[0].at_least
    assert recl(losses, [10, 20, 30], hardest=1.0)[0].length == 30


def test_losses_worse_than_the_baseline_do_not_count():
    """A model that reads far but badly gains nothing over the group's best."""
    losses = np.array([[[1.0], [1.0]], [[5.0], [2.0]]])
    assert recl(losses, [8, 16], hardest=1.0)[1].gains == (0.0,)
    assert recl(losses[1:], [8, 16], hardest=1.0)[0].gains == pytest.approx([1 - exp(-3.0)])


@pytest.mark.parametrize(
    ("contexts", "hardest", "told"),
    [
        ([8], 0.1, "name two or more, rising"),
        ([8, 8], 0.1, "8, 8 cannot give an effective context length"),
        ([0, 8], 0.1, "0, 8 cannot"),
        ([8, 16], 0.0, "hardest tokens is 0 but must be above 0"),
        ([8, 16], 1.5, "is 1.5 but must be above 0 and at most 1"),
    ],
)
def test_mistakes_are_told(contexts, hardest, told):
    with pytest.raises(KinformerError, match=told):
        recl(np.zeros((1, len(contexts), 4)), contexts, hardest=hardest)


def test_every_loss_has_exactly_its_context(corpus):
    model, split = tiny("gpt"), corpus.splits["test"].take(200)
    positions = spread_positions(split, 32, 7)
    assert positions[0] == 32 and positions[-1] == 199 and len(positions) == 7
    losses = context_losses(model, split, [1, 5, 32], positions, chunk=64)
    tokens = torch.from_numpy(split.tokens(0, 200).astype("int64"))
    for row, context in zip(losses, (1, 5, 32), strict=True):
        for loss, position in zip(row, positions.tolist(), strict=True):
            with torch.no_grad():
                logits = model(tokens[None, position - context : position])[0][0, -1]
            assert loss == pytest.approx(-float(logits.log_softmax(-1)[tokens[position]]), rel=1e-9)


def test_a_model_whose_positions_end_sees_what_it_can(corpus):
    model, split = tiny("gpt", **{"position.max_length": 16}), corpus.splits["test"].take(200)
    losses = context_losses(model, split, [8, 16, 40], spread_positions(split, 40, 5))
    assert np.array_equal(losses[1], losses[2]) and not np.array_equal(losses[0], losses[1])


def test_no_more_positions_than_there_are(corpus):
    split = corpus.splits["test"].take(20)
    assert spread_positions(split, 15, 100).tolist() == [15, 16, 17, 18, 19]
    with pytest.raises(KinformerError, match="a context of 20 needs 21"):
        spread_positions(split, 20, 1)


def test_only_the_first_run_says_what_contexts_are(monkeypatch):
    runs = [SimpleNamespace(folder="a", training={"length": 8}), SimpleNamespace(folder="b", training={})]
    monkeypatch.setattr(next_token_evaluation, "evaluate_recl", lambda *given: given[4])
    options = NextTokenEvaluationOptions(contexts="1x,2x", recl=True)
    assert next_token_evaluation.evaluate(runs, None, None, options, quiet=True) == [8, 16]
    with pytest.raises(KinformerError, match="contexts.* 1x: b does not say its training length"):
        next_token_evaluation.evaluate(runs, None, None, NextTokenEvaluationOptions(contexts="1x"), quiet=True)
