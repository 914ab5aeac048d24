"""What the global input is worth: the three measurements by hand, and that measuring leaves the model as it was."""

from math import log

import pytest
import torch

import kinformer
from kinformer.lab.data import BosEos, open_corpus
from kinformer.lab.data.masking import MaskedText, Masking, ordinary
from kinformer.lab.tasks.mlm import MaskedBatch, has_global_input, measure_global_input, silenced
from kinformer.lab.tasks.table import TASKS

LENGTH, ROWS = 34, 5


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    built = kinformer.build("etc", recipe="tiny", vocab_size=259).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return built


@pytest.fixture(scope="module")
def text(text_file):
    split = open_corpus(str(text_file)).splits["test"].take(400)
    return MaskedText(split, LENGTH, Masking(256, ordinary(256, set())), BosEos(257, 258), 0)


def bits(model, text, **inputs):
    """Of a masked token, by logits of all tokens."""
    nats = masked = 0.0
    for shown in text.in_order(1):
        batch = MaskedBatch.of(shown.rows)
        given = {name: make(batch.tokens) for name, make in inputs.items()}
        with torch.no_grad():
            logits = model(batch.tokens, valid=batch.valid, **given)[0, batch.positions[0]]
        chosen = batch.labels[0] >= 0
        nats -= float(logits.log_softmax(-1)[chosen].gather(1, batch.labels[0, chosen, None]).sum())
        masked += int(chosen.sum())
    return nats / masked / log(2)


def test_with_it_with_its_vectors_zeroed_and_without(model, text):
    found = measure_global_input(model, text, ROWS)
    assert found.bits == pytest.approx(bits(model, text), rel=1e-5)
    assert found.without == pytest.approx(bits(model, text, sentences=lambda x: torch.full_like(x, -1)), rel=1e-5)
    with silenced(model):
        assert found.zeroed == pytest.approx(bits(model, text), rel=1e-5)
    assert len({found.bits, found.zeroed, found.without}) == 3


def test_sentences_are_identified_among_those_of_the_same_rows(model, text):
    found = measure_global_input(model, text, ROWS)
    objective = TASKS["mlm"].objective("mlm-cpc", model)
    correct = sentences = groups = 0
    with torch.no_grad():
        for shown in text.in_order(ROWS, shuffled=True):
            _, metrics, _ = objective(model, MaskedBatch.of(shown.rows), None, 1.0)
            correct += int(metrics["cpc_correct"])
            sentences += int(metrics["cpc_predicted"])
            groups += 1
    assert sentences > 10
    assert (found.sentences, found.accuracy, found.chance) == (sentences, correct / sentences, groups / sentences)


def test_measuring_leaves_the_model_as_it_was(model, text):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    measure_global_input(model, text, ROWS)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(RuntimeError, match="stop"), silenced(model):
        assert not model.global_input.table.weight.any()
        raise RuntimeError("stop")
    assert torch.equal(model.global_input.table.weight, before["global_input.table.weight"])


def test_rows_from_all_over_the_text_are_the_same_windows(text):
    plain, shuffled = ([shown.rows.tokens for shown in text.in_order(1, shuffled=each)] for each in (False, True))
    assert sorted(each.tobytes() for each in plain) == sorted(each.tobytes() for each in shuffled)
    assert [each.tobytes() for each in plain] != [each.tobytes() for each in shuffled]


def test_who_has_one():
    recipes = {"etc": "tiny", "bert": "tiny", "gpt": "tiny", "big-bird": "tiny-etc"}
    found = [name for name, recipe in recipes.items() if has_global_input(kinformer.build(name, recipe=recipe))]
    assert found == ["etc"]
