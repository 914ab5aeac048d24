"""Bits per byte: every token once, whatever the chunk, the window or the tokenizer."""

from math import log, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinformer.lab.data import EvaluationStream, open_corpus, train_tokenizer
from kinformer.lab.evaluation.bits import Windows, batches, contexts, cut, measure, negative_log_likelihood, streamable
from kinformer.runtime.errors import KinformerError

from .conftest import tiny


def tokens_of(split):
    return torch.from_numpy(split.tokens(0, len(split)).astype("int64"))


def nats_of(model, tokens):
    """Sum over one sequence's predictions, each token's logits looked up one by one."""
    with torch.no_grad():
        logits = model(tokens[None, :-1])[0][0].log_softmax(-1)
    return -float(logits.gather(1, tokens[1:, None]).sum())


@pytest.mark.parametrize("name", ["linear-transformer", "fast-weights"])
def test_a_carried_state_is_the_whole_stream_at_once(corpus, name):
    model, split = tiny(name), corpus.splits["test"]
    nats = nats_of(model, tokens_of(split))
    for chunk in (64, 333, 10**6):
        told = measure(model, split, chunk=chunk)
        assert told.nats == pytest.approx(nats, rel=1e-10)
        assert told.tokens == len(split) - 1
        assert told.bits_per_byte == pytest.approx((nats / log(2) + 8) / split.bytes, rel=1e-10)
        assert told.bits_per_token == pytest.approx(nats / log(2) / (len(split) - 1), rel=1e-10)
        assert told.context is None


@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.75])
def test_windows_are_sequences_of_their_own(model, corpus, overlap):
    split = corpus.splits["test"].take(300)
    tokens, nats, scored = tokens_of(split), 0.0, 0
    while scored < 299:
        start = max(0, scored - int(40 * overlap)) if scored else 0
        window = tokens[start : start + 41]
        with torch.no_grad():
            logits = model(window[None, :-1])[0][0].log_softmax(-1)
        each = -logits.gather(1, window[1:, None])[:, 0]
        nats += float(each[scored - start :].sum())
        scored = start + len(window) - 1
    for chunk in (1, 100, 4096):
        told = measure(model, split, Windows(context=40, overlap=overlap), chunk=chunk)
        assert told.nats == pytest.approx(nats, rel=1e-10)
        assert told.tokens == 299
        assert (told.context, told.overlap) == (40, overlap)


@given(predictions=st.integers(1, 200), context=st.integers(1, 40), overlap=st.floats(0, 0.99), rows=st.integers(1, 5))
def test_windows_score_every_prediction_once_with_the_context_promised(predictions, context, overlap, rows):
    windows = Windows(context=context, overlap=overlap)
    plan = list(cut(predictions, windows))
    scored = [place for each in plan for place in range(each.start + each.unscored, each.start + each.size)]
    assert scored == list(range(predictions))
    assert plan[0].unscored == 0
    assert all(each.unscored == int(context * overlap) for each in plan[1:])
    assert all(each.size == context for each in plan[:-1])
    grouped = list(batches(predictions, windows, rows))
    assert [each for group in grouped for each in group] == plan
    assert all(len(group) <= rows and len({each.size for each in group}) == 1 for group in grouped)


def test_a_window_over_everything_is_the_carried_state(corpus):
    model, split = tiny("linear-transformer"), corpus.splits["test"]
    assert measure(model, split, Windows(context=10**6)).nats == pytest.approx(measure(model, split).nats, rel=1e-10)


def test_more_context_counts(corpus):
    model, split = tiny("linear-transformer"), corpus.splits["test"]
    assert measure(model, split, Windows(context=8)).nats != pytest.approx(measure(model, split).nats, rel=1e-4)


def test_the_denominator_is_bytes_also_with_a_tokenizer(text_file, corpus, tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = train_tokenizer(corpus.splits["train"], 300, tmp_path / "tokenizer.json")
    split = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path).splits["test"]
    assert len(split) < split.bytes == corpus.splits["test"].bytes
    model = tiny("linear-transformer", **{"input.vocab_size": 300})
    nats = nats_of(model, tokens_of(split))
    told = measure(model, split, chunk=50)
    assert told.bits_per_byte == pytest.approx((nats / log(2) + log2(tokenizer.vocab_size)) / split.bytes, rel=1e-10)
    with pytest.raises(KinformerError, match="has ids up to .* but this model knows 256"):
        measure(tiny("linear-transformer"), split)


def test_logits_of_large_vocabularies_are_made_piece_by_piece(corpus, monkeypatch):
    model, split = tiny("linear-transformer"), corpus.splits["test"].take(200)
    whole = measure(model, split).nats
    monkeypatch.setattr("kinformer.lab.evaluation.bits._LOGITS_AT_ONCE", 7 * 256)
    assert measure(model, split).nats == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("windows", [None, Windows(context=32), Windows(context=32, overlap=0.5)])
def test_contexts_count_every_target_once(corpus, windows):
    model, split = tiny("fast-weights"), corpus.splits["test"].take(300)
    with torch.no_grad():
        found = list(contexts(model, EvaluationStream(split, 100), windows))
    assert torch.equal(torch.cat([each.targets[each.counted] for each in found]), tokens_of(split)[1:])
    assert all(each.inputs.shape[:2] == each.targets.shape == each.counted.shape for each in found)


def test_the_likelihood_of_every_target():
    model = tiny("fast-weights")
    tokens = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        nats = negative_log_likelihood(model, model.hidden(tokens[:, :-1])[0], tokens[:, 1:])
        wanted = [nats_of(model, row) for row in tokens]
    assert nats.shape == (2, 20) and nats.dtype == torch.float64
    assert nats.sum(dim=1).tolist() == pytest.approx(wanted, rel=1e-10)


def test_which_models_carry_their_state():
    assert not streamable(tiny("gpt"))
    assert streamable(tiny("linear-transformer"))
    rope = {"position": "none", "layers.*.mixer.position": "rope"}
    assert not streamable(tiny("gpt", **rope))
    assert streamable(tiny("gpt", **rope, **{"layers.*.mixer.pattern": "local"}))


def test_progress_ends_at_the_number_of_predictions(corpus):
    told = []
    measure(tiny("linear-transformer"), corpus.splits["test"], chunk=100, progress=lambda *pair: told.append(pair))
    total = len(corpus.splits["test"]) - 1
    assert told[-1] == (total, total)
    assert [done for done, _ in told[:-1]] == list(range(100, total, 100))[: len(told) - 1]


def test_what_cannot_be_measured_is_told(corpus):
    split = corpus.splits["test"]
    with pytest.raises(KinformerError, match="a context of 129 tokens is beyond .* max_length = 128"):
        measure(tiny("gpt"), split, Windows(context=129))
    with pytest.raises(KinformerError, match="training mode"):
        measure(tiny("gpt").train(), split, Windows(context=12))
    with pytest.raises(KinformerError, match="chunk is 0"):
        measure(tiny("linear-transformer"), split, chunk=0)
    with pytest.raises(KinformerError, match="context is 0"):
        Windows(context=0)
    with pytest.raises(KinformerError, match="overlap is 1 but must be at least 0 and below 1"):
        Windows(context=4, overlap=1.0)
    broken = tiny("linear-transformer")
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    with pytest.raises(KinformerError, match="not finite numbers within the first 100 tokens of split 'test'"):
        measure(broken, split, chunk=100)
