"""Drafts: whatever they guess, what is drawn is what the model draws without them."""

import itertools

import pytest
import torch

import kinformer
from kinformer.generation.drafts import DraftedSession, NgramDraft
from kinformer.generation.generate import session_of
from kinformer.generation.recording import recordings_of
from kinformer.generation.sampling import UniformStreams
from kinformer.generation.session import Session
from kinformer.runtime.errors import KinformerError

from ..members import CAUSAL
from .conftest import tiny

AHEAD = {"ahead": 3}


class Oracle:
    """A draft that knows the text that is to come, and guesses every third token wrong."""

    reads_hidden = False

    def __init__(self, texts):
        self.texts = texts

    def guess(self, texts, most, hidden):
        guesses = torch.zeros(len(texts), most, dtype=torch.int64)
        for row, (text, full) in enumerate(zip(texts, self.texts, strict=True)):
            for place in range(most):
                index = len(text) + place
                token = full[index] if index < len(full) else 0
                guesses[row, place] = (token + 1) % 17 if index % 3 == 0 else token
        return guesses

    def fork(self, copies):
        return self


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_with_drafts_is_greedy(name):
    """With right and wrong guesses; for every member."""
    model = tiny(name, **AHEAD)
    prompt = torch.randint(0, 17, (1, 7), generator=torch.Generator().manual_seed(1))
    plain = kinformer.generate(model, prompt, max_new_tokens=14, temperature=0)
    session = DraftedSession(model, Oracle([[*prompt[0].tolist(), *plain[0].tolist()]]), length=4, temperature=0)
    session.feed(prompt)
    assert [token for (token,) in session.stream(14)] == plain[0].tolist()
    assert session.drafting.accepted > 3 and session.drafting.accepted < session.drafting.guessed
    for draft in ("ngram", "mtp"):
        assert torch.equal(kinformer.generate(model, prompt, max_new_tokens=14, temperature=0, draft=draft), plain)


@pytest.mark.parametrize("name", ["gpt", "linear-transformer", "gated-deltanet", "alibi"])
def test_passes_are_recorded_where_that_can_be(name):
    model, prompt = tiny(name), torch.randint(0, 17, (1, 7), generator=torch.Generator().manual_seed(1))
    plain = kinformer.generate(model, prompt, max_new_tokens=90, temperature=0)
    for _ in range(2):
        oracle = Oracle([[*prompt[0].tolist(), *plain[0].tolist()]])
        session = DraftedSession(model, oracle, length=4, temperature=0, room=90)
        session.feed(prompt)
        assert [token for (token,) in session.stream(90)] == plain[0].tolist()
    assert any(recording.time == 5 for recording in recordings_of(model))


SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "top_k": 3, "seed": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.4, "seed": 5},
]


@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("draft", ["ngram", "mtp", "model", "itself"])
def test_every_sampling_draws_the_same_tokens(draft, options):
    model, prompt = tiny("gated-deltanet", **AHEAD), torch.tensor([[1, 2, 3, 4, 1, 2, 3]]).expand(2, -1)
    draft = {"model": tiny("gpt"), "itself": model}.get(draft, draft)
    plain = kinformer.generate(model, prompt, max_new_tokens=30, **options)
    for length in (1, 5):
        drawn = kinformer.generate(model, prompt, max_new_tokens=30, draft=draft, draft_length=length, **options)
        assert torch.equal(drawn, plain)


def test_a_model_that_drafts_for_itself_is_always_right(linear):
    session = session_of(linear, 1, linear, 4, {"temperature": 0.0})
    session.feed(torch.tensor([[1, 2, 3]]))
    for _ in range(51):
        session.step()
    facts = session.drafting
    assert facts.accepted == facts.guessed == 40 and facts.passes == 11 and facts.drawn == 51


class Markov(torch.nn.Module):
    """A causal model whose next token depends on the last, by quarters: after 0 it is 0, 1, 2 by 2, 1, 1 of them."""

    vocab_size, max_length = 3, None
    quarters = torch.tensor([[2, 1, 1], [1, 1, 2], [1, 2, 1]], dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(self.quarters.log())

    def initial_state(self, batch):
        return (torch.zeros(batch, dtype=torch.int64),)

    def head_inputs(self, tokens, state, valid=None):
        return torch.nn.functional.one_hot(tokens, 3).double(), (state[0] + tokens.shape[1],)

    def logits(self, inputs):
        return inputs @ self.table


@pytest.mark.parametrize("guesses", list(itertools.product(range(3), repeat=2)))
def test_what_is_drawn_has_the_distribution_of_the_model(guesses, monkeypatch):
    """Exactly, by enumeration of all numbers that three draws may take, whatever is guessed."""
    model, counts = Markov().eval(), torch.zeros(3, 3, 3)
    draft = Oracle([[0, *guesses, *guesses, *guesses]])
    draft.guess = lambda texts, most, hidden: torch.tensor([guesses])
    for numbers in itertools.product(range(4), repeat=3):
        uniform = iter(torch.tensor([*numbers, 0, 0, 0], dtype=torch.float64)[:, None, None] / 4 + 0.125)
        monkeypatch.setattr(UniformStreams, "next", lambda self, device, uniform=uniform: next(uniform))
        session = DraftedSession(model, draft, length=2, seed=0, recorded=False)
        session.feed(torch.tensor([[0]]))
        counts[tuple(int(session.step()) for _ in range(3))] += 1
    quarters = model.quarters
    expected = torch.einsum("a,ab,bc->abc", quarters[0], quarters, quarters)
    assert torch.equal(counts.double(), expected)


def test_rows_of_unlike_prompts_and_stops_are_those_without_drafts(model):
    prompt = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(2))
    valid = torch.arange(9) < torch.tensor([[9], [2], [5]])
    options = {"valid": valid, "max_new_tokens": 40, "temperature": 0.8, "seed": 3}
    free = kinformer.generate(model, prompt, **options)
    stop = [free[0, 6:8].tolist(), free[1, 11:12].tolist()]
    plain = kinformer.generate(model, prompt, stop=stop, **options)
    for draft in ("ngram", tiny("linear-transformer")):
        assert torch.equal(kinformer.generate(model, prompt, draft=draft, **options), free)
        assert torch.equal(kinformer.generate(model, prompt, draft=draft, stop=stop, **options), plain)


def test_drafted_sessions_are_fed_rewound_and_forked(model):
    """Text may come between steps, be taken back, and go on in copies, as in a session without a draft."""
    drafted = session_of(model, 1, model, 4, {"temperature": 0.0, "rewind": 3})
    plain = Session(model, temperature=0, rewind=3)
    prompt = torch.randint(0, 17, (1, 9), generator=torch.Generator().manual_seed(2))
    for session in (drafted, plain):
        session.feed(prompt)
    for number in range(6):
        steps = [[int(session.step()) for _ in range(number + 2)] for session in (drafted, plain)]
        assert steps[0] == steps[1] and drafted.length == plain.length
        if number % 2:
            for session in (drafted, plain):
                session.rewind(3)
        else:
            for session in (drafted, plain):
                session.feed(prompt[:, :number])
        assert drafted.length == plain.length
    forks = [session.fork(2) for session in (drafted, plain)]
    assert [forks[0].step().tolist() for _ in range(9)] == [forks[1].step().tolist() for _ in range(9)]
    with pytest.raises(KinformerError, match=r"can go back by \[3\]"):
        drafted.rewind(4)


def test_samples_of_one_prompt_are_those_without_drafts(linear):
    prompt = torch.tensor([[1, 2, 3, 1, 2, 3]])
    plain = Session(linear, seed=2)
    drafted = session_of(linear, 1, "ngram", 4, {"seed": 2})
    drawn = []
    for session in (plain, drafted):
        session.feed(prompt)
        copies = session.fork(3)
        drawn.append([copies.step().tolist() for _ in range(20)])
    assert drawn[0] == drawn[1]


def test_the_last_positions_are_used_and_not_passed(gpt):
    prompt = torch.randint(0, 17, (1, 110), generator=torch.Generator().manual_seed(2))
    plain = kinformer.generate(gpt, prompt, max_new_tokens=19, temperature=0)
    for draft in (gpt, tiny("linear-transformer"), "ngram"):
        drawn = kinformer.generate(gpt, prompt, max_new_tokens=19, temperature=0, draft=draft, draft_length=6)
        assert torch.equal(drawn, plain)
        with pytest.raises(KinformerError, match="positions end at max_length = 128"):
            kinformer.generate(gpt, prompt, max_new_tokens=20, draft=draft)


def test_the_longest_end_that_was_there_before_continues():
    def guesses(*texts, most=8):
        result = NgramDraft().guess(texts, most, None)
        return result if result is None else ["".join(map(chr, row)) for row in result.tolist()]

    assert guesses("one two three, one two ") == ["three, o"]
    assert guesses("one two three, one two ", most=3) == ["thr"]
    assert guesses("abcX.abcY,abc") == ["Y,abcY,a"]  # the last place
    assert guesses("xabcX.abcY,xabc") == ["X.abcY,x"]  # the longest
    assert guesses("ababab") == ["abababab"]  # what is guessed may continue
    assert guesses("abcd") is None and guesses("") is None and guesses("ab ab") is None
    assert guesses("abcX abc", "abcd", most=2) == ["X ", "\0\0"]


def test_drafts_of_other_tokens_are_refused(linear):
    prompt = torch.tensor([[1, 2, 3]])
    other = kinformer.build("gpt", recipe="tiny", set={"input.vocab_size": 18}).double().eval()
    with pytest.raises(KinformerError, match="the draft knows 18 tokens, but the model 17"):
        kinformer.generate(linear, prompt, max_new_tokens=2, draft=other)
    with pytest.raises(KinformerError, match="draft is 'ngrams' but must be 'ngram', 'mtp' or a causal model"):
        kinformer.generate(linear, prompt, max_new_tokens=2, draft="ngrams")
    with pytest.raises(KinformerError, match="the draft 'mtp' needs a model that predicts further tokens"):
        kinformer.generate(linear, prompt, max_new_tokens=2, draft="mtp")
    with pytest.raises(KinformerError, match="draft_length is 0"):
        kinformer.generate(linear, prompt, max_new_tokens=2, draft="ngram", draft_length=0)
