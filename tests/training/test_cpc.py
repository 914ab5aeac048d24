"""Masked sentences that their global tokens predict: what is masked, what is compared, and that it is learnt."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.lab.data import IGNORED
from kinformer.lab.tasks.mlm import WEIGHT, MaskedBatch, MaskedLanguage, MaskedLanguageCpc, contrasted, restored
from kinformer.lab.tasks.table import TASKS
from kinformer.runtime.errors import KinformerError

MASK, FIRST, LAST = 58, 59, 60


def model(**changes):
    torch.manual_seed(0)
    return kinformer.build("etc", recipe="tiny", vocab_size=61, set=changes)


def batch(rows=3, time=64):
    """Rows between BOS and EOS, the last one shorter, of which some tokens are masked."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randint(58, (rows, time), generator=generator)
    lengths = torch.full((rows, 1), time)
    lengths[-1] = time // 2 + 3
    valid = torch.arange(time) < lengths
    plain[:, 0] = FIRST
    plain = plain.scatter(1, lengths - 1, LAST).masked_fill(~valid, 0)
    positions = torch.tensor([3, 11, 20, 21, 30]).repeat(rows, 1)
    labels = plain.gather(1, positions)
    positions[1, 3:], labels[1, 3:] = 0, IGNORED
    masked = torch.zeros_like(valid).scatter(1, positions, labels != IGNORED)
    return plain, MaskedBatch(plain.masked_fill(masked, MASK), valid, labels, positions)


def test_what_was_masked_is_put_back():
    plain, shown = batch()
    assert torch.equal(restored(shown), plain)
    assert not torch.equal(shown.tokens, plain)


def test_sentences_are_masked_as_a_whole_and_not_predicted_byte_by_byte():
    plain, shown = batch()
    objective = MaskedLanguageCpc(8, MASK, (FIRST, LAST))
    torch.manual_seed(2)
    for _ in range(20):
        chosen = objective.choose(shown, fresh=True)
        tokens, left = objective.mask(shown.tokens, chosen), objective.left(shown, chosen)
        for row, (sentence, real) in enumerate(
            zip(chosen.sentences[:, 0].tolist(), chosen.real[:, 0].tolist(), strict=True)
        ):
            assert real and 0 < sentence < (7 if row < 2 else 4)  # neither end, and whole in the short row
            part = slice(8 * sentence, 8 * sentence + 8)
            assert (tokens[row, part] == MASK).all()
            others = torch.ones(64, dtype=torch.bool)
            others[part] = False
            assert torch.equal(tokens[row, others], shown.tokens[row, others])
            counted = shown.labels[row] != IGNORED
            inside = (shown.positions[row] >= part.start) & (shown.positions[row] < part.stop)
            assert torch.equal(left.labels[row] != IGNORED, counted & ~inside)
    assert len({int(objective.choose(shown, fresh=True).sentences[0, 0]) for _ in range(50)}) == 6
    assert torch.equal(*(objective.choose(shown, fresh=False).sentences for _ in range(2)))


def test_the_share_of_sentences():
    _, shown = batch(time=8 * 20)
    assert MaskedLanguageCpc(8, MASK).choose(shown, fresh=True).sentences.shape == (3, 2)
    assert MaskedLanguageCpc(161, MASK).choose(shown, fresh=True) is None


def test_rows_whose_labels_do_not_count_are_left_out():
    """A row that is there twice, as processes have them to be as many for each."""
    _, shown = batch()
    shown.labels[1] = IGNORED
    chosen = MaskedLanguageCpc(8, MASK, (FIRST, LAST)).choose(shown, fresh=False)
    assert chosen.real[:, 0].tolist() == [True, False, True]


def test_the_loss_is_that_of_the_formula():
    one = model().eval()
    plain, shown = batch()
    objective = TASKS["mlm"].objective("mlm-cpc", one)
    loss, metrics, state = objective(one, shown, None, 0.5)
    assert state is None
    chosen = objective.choose(shown, fresh=False)
    encoded = one.hidden(objective.mask(shown.tokens, chosen), valid=shown.valid)
    contexts, sentences = [], []
    for row, sentence in enumerate(chosen.sentences[:, 0].tolist()):
        contexts.append(encoded.global_input[row, sentence])
        sentences.append(one.hidden(plain[row, 8 * sentence : 8 * sentence + 8][None]).global_input[0, 0])
    g, h = (functional.batch_norm(torch.stack(each), None, None, training=True) for each in (contexts, sentences))
    logits = g @ h.T / 32**0.5
    further = functional.cross_entropy(logits, torch.arange(3))
    masked = objective.mask(shown.tokens, chosen)
    plainly, found, _ = MaskedLanguage()(one, objective.left(shown, chosen)._replace(tokens=masked), None, 0.5)
    torch.testing.assert_close(loss, (1 - WEIGHT) * plainly + WEIGHT * further)
    assert metrics["predicted"] == found["predicted"]
    assert metrics["cpc_predicted"] == 3 and metrics["cpc_by_chance"] == 1
    assert metrics["cpc_correct"] == (logits.argmax(1) == torch.arange(3)).sum()


def test_what_does_not_count_is_no_candidate():
    g, h = torch.randn(4, 8), torch.randn(4, 8)
    real = torch.tensor([True, False, True, True])
    loss, metrics, _ = contrasted(g, h, real)
    want, _, _ = contrasted(g[real], h[real], torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(loss, want)
    assert metrics["predicted"] == 3
    none, metrics, _ = contrasted(g, h, torch.zeros(4, dtype=torch.bool))
    assert none == 0 and metrics["predicted"] == 0


def test_global_tokens_learn_to_identify_their_sentences():
    """In each text one byte is all there is: what is masked is known from what is not."""
    one = model().train()
    objective = TASKS["mlm"].objective("mlm-cpc", one)
    optimiser = torch.optim.AdamW(one.parameters(), lr=3e-3)
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        letters = torch.randperm(58, generator=generator)[:16, None].expand(-1, 32)
        positions = torch.full((16, 1), 2)
        shown = MaskedBatch(letters.scatter(1, positions, MASK), None, letters[:, :1], positions)
        loss, metrics, _ = objective(one, shown, None, 0.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert metrics["cpc_correct"] > 5 * metrics["cpc_by_chance"]


def test_a_model_without_sentences_is_refused():
    with pytest.raises(KinformerError, match="a global token for every sentence"):
        TASKS["mlm"].objective("mlm-cpc", kinformer.build("bert", recipe="tiny", vocab_size=61))
    with pytest.raises(KinformerError, match="needs an encoder with a mask token"):
        TASKS["mlm"].objective("mlm-cpc", kinformer.build("gpt", recipe="tiny", vocab_size=61))
