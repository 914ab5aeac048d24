"""Beam search against a search over all sequences, alone and among others, with caches that are reordered."""

import itertools

import pytest
import torch

import kinformer
from kinformer.core.attention_state import ReservedSlots
from kinformer.core.state import difference, reserve, select_rows, value
from kinformer.generation.beam import Search, beam_search
from kinformer.runtime.errors import KinformerError

BOS, EOS = 4, 5


def build(member="vanilla", vocab_size=6, **changes):
    torch.manual_seed(1)
    model = kinformer.build(member, recipe="tiny", vocab_size=vocab_size, set=changes).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def score(model, source, tokens, penalty):
    """Of a sequence with its EOS, by reading it at once."""
    ids = [*tokens, EOS]
    logits, _ = model(torch.tensor([[BOS, *ids[:-1]]]), model.begin(source))
    odds = logits[0].log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].sum()
    return float(odds) / ((5 + len(ids)) / 6) ** penalty


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5])
def test_a_beam_as_wide_as_there_are_sequences_finds_the_best(penalty):
    """Of four tokens and EOS, at most two long: what is so long must end, at the probability of EOS."""
    model, source, known = build(vocab_size=130), torch.tensor([[1, 2, 3]]), range(4)
    model.head.forward = limited(model.head.forward, [*known, EOS])
    every = [list(each) for count in range(3) for each in itertools.product(known, repeat=count)]
    with torch.no_grad():
        found = beam_search(model, model.begin(source), Search(BOS, EOS, 100, penalty), [2]).best[0]
        scores = [score(model, source, tokens, penalty) for tokens in every]
    assert abs(found.score - max(scores)) < 1e-5
    assert found.tokens == every[scores.index(max(scores))]


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_that_is_cut_off_does_not_beat_those_that_end(beam):
    """EOS is improbable where the limit is, and was probable before it."""
    model, source = build(vocab_size=23), torch.tensor([[1, 2, 3]])
    odds = torch.tensor([0.0, *[-9.0] * 21, -0.5])
    model.head.forward = lambda hidden, *rest, **options: odds.expand(*hidden.shape[:-1], 23)
    found = beam_search(model, model.begin(source), Search(21, 22, beam, 0.0), [5]).best[0]
    ends = odds.masked_fill(torch.arange(23) == 21, -9.0).log_softmax(0)
    count = len(found.tokens)
    assert abs(found.score - float(count * ends[0] + ends[22])) < 1e-5
    assert count == (5 if beam == 1 else 0)


def limited(forward, known):
    def run(*given, **options):
        logits = forward(*given, **options)
        hidden = torch.ones(logits.shape[-1], dtype=torch.bool)
        hidden[known] = False
        return logits.masked_fill(hidden, -1e4)

    return run


def sources(count, seed=2):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (count,), generator=generator)
    source = torch.randint(4, (count, 11), generator=generator)
    return source, torch.arange(11) < lengths[:, None]


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize(
    "changes", [{}, {"layers.*.mixer": "linear"}, {"layers.*.mixer.pattern": {"kind": "local", "window": 3}}]
)
def test_thirty_two_sentences_alone_and_together(beam, changes):
    model = build(vocab_size=23, **changes)
    source, valid = sources(32)
    most = [int(row.sum()) + 6 for row in valid]
    search = Search(21, 22, beam)
    together = beam_search(model, model.begin(source, valid), search, most).best
    assert changes or len({len(each.tokens) for each in together}) > 1
    for row, want in enumerate(together):
        own = source[row : row + 1, : int(valid[row].sum())]
        alone = beam_search(model, model.begin(own), search, [most[row]]).best[0]
        assert alone.tokens == want.tokens and abs(alone.score - want.score) < 1e-5


def test_a_beam_of_one_is_greedy():
    model, (source, valid) = build(vocab_size=23), sources(5)
    found = beam_search(model, model.begin(source, valid), Search(21, 22, 1), [9] * 5).best
    state = model.begin(source, valid)
    tokens, drawn = torch.full((5, 1), 21), []
    with torch.no_grad():
        for _ in range(9):
            logits, state = model(tokens, state)
            logits[..., 21] = -torch.inf
            tokens = logits[:, -1:].argmax(-1)
            drawn.append(tokens)
    for row, want in zip(torch.cat(drawn, 1).tolist(), found, strict=True):
        assert want.tokens == (row[: row.index(22)] if 22 in row else row)


def test_a_better_score_is_found_than_greedily():
    model, (source, valid) = build(vocab_size=23), sources(12)
    scores = [
        sum(each.score for each in beam_search(model, model.begin(source, valid), Search(21, 22, beam), [12] * 12).best)
        for beam in (1, 4)
    ]
    assert scores[1] > scores[0]


def test_selected_rows_are_copied_once_and_are_those_of_values():
    model = build(vocab_size=23)
    source, valid = sources(3)
    tokens, rows = torch.randint(20, (3, 5)), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        state = reserve(model.begin(source, valid), 20)
        fresh = select_rows(state, rows)
        _, state = model(tokens, state)
        chosen = select_rows(state, rows)
        kept = chosen.layers[0][0]
        assert (
            isinstance(kept, ReservedSlots)
            and next(kept.tensors()).shape[2] == next(state.layers[0][0].tensors()).shape[2]
        )
        before = next(kept.tensors()).data_ptr()
        _, after = model(tokens[rows], chosen)
        assert next(after.layers[0][0].tensors()).data_ptr() == before, "it goes on in the buffers of the copy"
        _, want = model(tokens[rows], select_rows(value(state), rows))
        assert difference(after, want) < 1e-12
        _, again = model(tokens, state)
        assert again.seen.tolist() == [10] * 3, "the state that was selected from may be used"
        assert (
            difference(model(tokens[rows], fresh)[1], select_rows(model(tokens, model.begin(source, valid))[1], rows))
            < 1e-12
        )


def test_mistakes():
    model, (source, valid) = build(), sources(1)
    with pytest.raises(KinformerError, match="a beam of 6 must be 1 or more, and fewer than the 6 ids"):
        beam_search(model, model.begin(source, valid), Search(BOS, EOS, 6), [3])
    with torch.no_grad():
        model.input.embedding.weight.fill_(torch.nan)
    with pytest.raises(KinformerError, match="not finite"):
        beam_search(model, model.begin(source, valid), Search(BOS, EOS), [3])
