"""Continuations scored behind shared contexts are what a full forward of every single one gives."""

import random

import pytest
import torch

import kinformer
from kinformer.lab.evaluation.continuations import SHARED, Continuation, ContinuationScorer
from kinformer.runtime.errors import KinformerError

VOCAB = 64
MEMBERS = ("gpt", "linear-transformer", "gated-deltanet", "transformer-xl", "reformer", "memorizing")


def built(name):
    torch.manual_seed(0)
    return kinformer.build(name, recipe="tiny", vocab_size=VOCAB).double().eval()


def drawn(number, length):
    return tuple(random.Random(f"{number} {length}").choices(range(VOCAB), k=length))


def questions():
    """Six contexts, half of which begin alike and two of these for longer, with one to four continuations each."""
    stem, examples = drawn(0, SHARED + 8), drawn(1, SHARED + 1)
    contexts = [drawn(2, 1), stem + drawn(3, 5), drawn(4, 40), stem + examples + drawn(5, 33), drawn(6, 3)]
    contexts.append(stem + examples + drawn(7, 2))
    return [
        Continuation(context, drawn(10 * number + choice, (1, 7, 2, 1)[choice]))
        for number, context in enumerate(contexts)
        for choice in range(1 + number % 4)
    ]


def plain(model, continuation, length):
    """The log-likelihood by one forward of all that the model may read, and whether all tokens are the arg max."""
    context, tokens = continuation
    ids = torch.tensor([(context + tokens)[-(length + 1) if length else 0 :]])
    with torch.no_grad():
        predicted = model(ids[:, :-1])[0].log_softmax(-1)[0, -len(tokens) :]
    target = ids[0, -len(tokens) :]
    return float(predicted.gather(1, target[:, None]).sum()), bool((predicted.argmax(-1) == target).all())


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize(("length", "chunk", "rows"), [(128, 2048, None), (128, 9, None), (20, 64, 1)])
def test_scores_are_those_of_full_forwards(name, length, chunk, rows):
    model, asked_for = built(name), questions()
    scorer = ContinuationScorer(model, length, chunk=chunk, rows=rows)
    scores = dict(scorer.scores(asked_for))
    assert sorted(scores) == list(range(len(asked_for)))
    for number, continuation in enumerate(asked_for):
        expected, greedy = plain(model, continuation, length)
        assert scores[number].log_likelihood == pytest.approx(expected, abs=1e-9)
        assert scores[number].greedy == greedy


def test_what_the_model_predicts_is_greedy():
    model, context = built("gpt"), drawn(0, 5)
    tokens = tuple(kinformer.generate(model, [context], max_new_tokens=4, temperature=0)[0].tolist())
    other = (*tokens[:-1], (tokens[-1] + 1) % VOCAB)
    scores = dict(ContinuationScorer(model).scores([Continuation(context, tokens), Continuation(context, other)]))
    assert (scores[0].greedy, scores[1].greedy) == (True, False)


def test_a_shared_context_is_absorbed_once():
    stem, question = drawn(0, 100), drawn(1, 50)
    scorer = ContinuationScorer(built("linear-transformer"))
    choices = [Continuation(stem + question, drawn(2 + choice, 5)) for choice in range(4)]
    other = [Continuation(stem + drawn(9, 3), drawn(10, 2))]
    list(scorer.scores(choices + other))
    assert scorer.absorbed == 100 + 50 + 4 * (5 - 1) + 3 + 1


def test_nothing_is_certain_and_too_much_is_refused():
    scorer = ContinuationScorer(built("gpt"), 8)
    assert dict(scorer.scores([Continuation((1,), ())])) == {0: (0.0, True)}
    with pytest.raises(KinformerError, match="a continuation has 9 tokens, but the model reads 8 at most"):
        list(scorer.scores([Continuation((1,), drawn(0, 9))]))


def test_damaged_weights_are_reported():
    model = built("gpt")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(KinformerError, match="not finite numbers behind 2 tokens"):
        list(ContinuationScorer(model).scores([Continuation((1, 2), (3,))]))
