"""Exits in translation: the losses of all exits reach every weight, and are those of the decoder cut behind each."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.core.state import repeat_rows
from kinformer.family.build import configure
from kinformer.lab.data import IGNORED
from kinformer.lab.evaluation.depths import Exited, saved
from kinformer.lab.tasks.translate import PairBatch, TranslationExits, TranslationLoss, padded
from kinformer.runtime.errors import KinformerError
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
    TranslationExits(0.1)(model, batch, None, 0.6)[0].backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None]
    assert model.stack.rule.linear.weight.grad.abs().sum() > 0


def test_the_aligned_loss_is_that_of_the_decoder_cut_behind_each_exit(batch):
    model, total = made(weights="linear").train(), 0.0
    loss = TranslationExits(0.1)(model, batch, None, 0.0)[0]
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
    drawn = TranslationExits(0.0)(model, batch, None, 0.0)[0]
    monkeypatch.setattr(torch, "randint_like", lambda like, most: torch.full_like(like, most - 1))
    whole = TranslationExits(0.0)(model, batch, None, 0.0)[0]
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
        TranslationExits.of(kinformer.build("vanilla", recipe="tiny", vocab_size=23), None)


SEQUENCE = {"kind": "sequence_multinomial", "since": 0.0}


@pytest.mark.parametrize("oracle", ["likelihood", "correctness"])
@pytest.mark.parametrize("penalty", [0.0, 0.4, 90.0])
def test_one_exit_for_a_sequence_is_its_formula(batch, oracle, penalty):
    """By loops over rows, exits and tokens, from the encoder's own vectors."""
    rule = SEQUENCE | {"oracle": oracle, "penalty": penalty, "alpha": 0.7}
    model = made(rule=rule).train()
    plain = made().train()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if "rule" not in name})
    costs, counted = [], batch.labels != IGNORED
    state = model.begin(batch.source, batch.source_valid)
    vectors = model.encoder(batch.source, batch.source_valid)
    _, _, tapped = model.hidden(batch.target, state, valid=batch.target_valid, taps=(0, 1, 2))
    for row in range(2):
        scores = []
        for number, x in enumerate(tapped):
            odds = torch.log_softmax(model.exit_logits(x[row], number), -1)[counted[row]]
            labels = batch.labels[row][counted[row]]
            right = odds.gather(1, labels[:, None]) if oracle == "likelihood" else (odds.argmax(-1) == labels).double()
            scores.append(float(right.detach().sum()) - penalty * number)
        mean = vectors[row][batch.source_valid[row]].mean(0)
        log_q = torch.log_softmax(model.stack.rule.linear(mean), -1)
        costs.append(-log_q[scores.index(max(scores))])
    losses = [TranslationExits(0.0)(each, batch, None, 0.6)[0] for each in (model, plain)]
    torch.testing.assert_close(losses[0] - losses[1], 0.7 * torch.stack(costs).mean())
    (losses[0] - losses[1]).backward()
    assert model.encoder.stack.layers[0].feed_forward.down.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("check", ["causality", "partition", "padding", "reserved"])
def test_one_exit_for_a_sequence_keeps_the_contract(check):
    config = configure("depth-adaptive", "tiny-translate", 23)
    MODEL_CHECKS[check](SourceModelSubject(config.build, vocab_size=23))


def test_all_tokens_of_a_translation_leave_by_one_exit(batch):
    """Each row's own; hypotheses of a beam by that of their source; the last exit is the plain decoder."""
    torch.manual_seed(0)
    model = made(rule=SEQUENCE).eval()
    with torch.no_grad():
        model.stack.rule.linear.weight.normal_(std=30.0, generator=torch.Generator().manual_seed(3))
    left = []
    hook = model.stack.left.register_forward_hook(lambda _, seen, __: left.append(seen[0]))
    state = model.begin(batch.source, batch.source_valid)
    logits, after = model(batch.target, state, valid=batch.target_valid)
    want = model.stack.rule.linear(state.source.mean).argmax(-1)
    assert torch.equal(left[0], want[:, None].expand_as(left[0])) and len(set(want.tolist())) == 2
    assert after.source is state.source
    model(batch.target.repeat_interleave(3, 0)[:, :1], repeat_rows(state, 3, sources=False))
    assert torch.equal(left[1][:, 0], want.repeat_interleave(3))
    hook.remove()
    plain = made().eval()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if "rule" not in name})
    with torch.no_grad():
        model.stack.rule.linear.weight.zero_()
        model.stack.rule.linear.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    same, _ = model(batch.target, model.begin(batch.source, batch.source_valid), valid=batch.target_valid)
    whole, _ = plain(batch.target, plain.begin(batch.source, batch.source_valid), valid=batch.target_valid)
    torch.testing.assert_close(same, whole, rtol=0, atol=1e-12)
    assert (logits - whole).abs().max() > 1e-3


def test_what_one_exit_for_a_sequence_saves_is_measured():
    model = made(rule=SEQUENCE).eval()
    found = saved(model, Exited(layers=(1, 2, 3), tokens=(3, 0, 0)), past=2, source=4)
    assert found.flops_saved > 0.1 and found.speedup > 0


def test_a_decoder_alone_has_no_source_to_predict_an_exit_from():
    with pytest.raises(KinformerError, match="reads the source of a translation, but this model has none"):
        kinformer.build("depth-adaptive", recipe="tiny", set={"stack.rule": "sequence_multinomial"})
