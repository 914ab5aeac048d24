"""Exits in translation: the losses of all exits reach every weight, and are those of the decoder cut behind each."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.data import IGNORED
from kinformer.family.build import configure
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.translate.exit_losses import TranslationExits
from kinformer.tasks.translate.rows import PairBatch, TranslationLoss, padded
from kinformer.testing import MODEL_CHECKS, SourceModelSubject

EXITS = {"layers": 3, "head.tied": False, "stack": {"kind": "exits", "classifiers": "separate"}}


def made(**stack):
    torch.manual_seed(0)
    changes = EXITS | {f"stack.{name}": value for name, value in stack.items()}
    return kinformer.build("vanilla", recipe="tiny", vocab_size=23, set=changes).double()


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(20, (length,), generator=draw).tolist() for length in (6, 3)]
    source, source_valid = padded([[*row, 22] for row in rows])
    target, valid = padded([[21, *row] for row in rows])
    labels, _ = padded([[*row, 22] for row in rows])
    return PairBatch(source, source_valid, target, valid, labels.masked_fill(~valid, IGNORED), torch.tensor([6, 3]))


@pytest.mark.parametrize("rule", ["geometric", "multinomial"])
def test_every_weight_of_exits_and_rule_learns(batch, rule):
    model = made(rule={"kind": rule, "since": 0.0}).train()
    TranslationExits.of(model, 0.1)(model, batch, None, 0.6)[0].backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None]
    assert model.stack.rule.linear.weight.grad.abs().sum() > 0


def test_the_aligned_loss_is_that_of_the_decoder_cut_behind_each_exit(batch):
    model, total = made(weights="linear").train(), 0.0
    loss = TranslationExits.of(model, 0.1)(model, batch, None, 0.0)[0]
    counted = batch.labels != IGNORED
    state = model.begin(batch.source, batch.source_valid)
    for number in range(3):
        tapped = model.hidden(batch.target, state, valid=batch.target_valid, taps=(number,))[2][0]
        logits = model.exit_logits(tapped, number)[counted]
        nats = functional.cross_entropy(logits.float(), batch.labels[counted], label_smoothing=0.1)
        total = total + (number + 1) * nats / 6
    torch.testing.assert_close(loss, total)
    whole = TranslationLoss(0.1)(model, batch, None, 0.0)[0]
    assert (loss - whole).abs() > 1e-4


def test_mixed_training_of_a_token_that_never_leaves_early_is_the_plain_loss(batch, monkeypatch):
    model = made(training="mixed", samples=2).train()
    drawn = TranslationExits.of(model, 0.0)(model, batch, None, 0.0)[0]
    monkeypatch.setattr(torch, "randint_like", lambda like, most: torch.full_like(like, most - 1))
    whole = TranslationExits.of(model, 0.0)(model, batch, None, 0.0)[0]
    plain = TranslationLoss(0.0)(model.eval(), batch, None, 0.0)[0]
    torch.testing.assert_close(whole, plain)
    assert (drawn - plain).abs() > 1e-5


@pytest.mark.parametrize("check", ["causality", "partition", "padding"])
def test_tokens_that_leave_early_keep_the_contract(check):
    rule = {"kind": "softmax_response", "thresholds": [0.05]}
    config = configure("vanilla", "tiny", 23, set={**EXITS, "stack.rule": rule})
    MODEL_CHECKS[check](SourceModelSubject(config.build, vocab_size=23))


def test_a_stack_without_exits_is_refused(batch):
    with pytest.raises(KinformerError, match="needs a decoder whose tokens may leave early"):
        TranslationExits.of(kinformer.build("vanilla", recipe="tiny", vocab_size=23), 0.1)
