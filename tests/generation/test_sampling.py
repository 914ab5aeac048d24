"""Which tokens may be drawn, how often, and from which numbers."""

import pytest
import torch

import kinformer
from kinformer.generation.sampling import Sampling, TokenSampler, candidates
from kinformer.generation.session import Session
from kinformer.runtime.errors import KinformerError


def weights(logits, **options):
    """Probabilities in the order of the vocabulary."""
    probabilities, tokens = candidates(logits, Sampling(seed=0, **options))
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities if tokens is None else torch.zeros_like(logits).scatter(1, tokens, probabilities)


@pytest.fixture
def logits():
    return torch.randn(5, 17, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_without_limits_every_token_has_its_probability(logits):
    assert torch.allclose(weights(logits), logits.softmax(-1), rtol=1e-12)
    assert torch.allclose(weights(logits, temperature=0.5), (2 * logits).softmax(-1))


def test_top_k_keeps_the_k_most_probable(logits):
    kept = weights(logits, top_k=4)
    fourth = logits.sort(descending=True).values[:, 3:4]
    assert torch.equal(kept > 0, logits >= fourth)
    assert torch.allclose(kept, logits.masked_fill(logits < fourth, -torch.inf).softmax(-1))
    assert torch.equal(weights(logits, top_k=17), weights(logits))
    assert torch.equal(weights(logits, top_k=99), weights(logits))


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.6, 0.95])
def test_top_p_keeps_the_fewest_that_reach_p(logits, top_p):
    kept = weights(logits, top_p=top_p) > 0
    for row, full in zip(kept, logits.softmax(-1), strict=True):
        mass = full[row].sum()
        assert mass >= top_p
        assert mass - full[row].min() < top_p
        assert full[row].min() > full[~row].max()


def test_top_p_is_a_share_of_what_top_k_left(logits):
    kept = weights(logits, top_k=5, top_p=0.5, temperature=1.5)
    left = weights(logits, top_k=5, temperature=1.5)
    for row, full in zip(kept, left, strict=True):
        chosen = row > 0
        assert full[chosen].sum() >= 0.5
        assert full[chosen].sum() - full[chosen].min() < 0.5
        assert torch.allclose(row[chosen], full[chosen] / full[chosen].sum())


@pytest.mark.parametrize("others", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 1.7}])
def test_min_p_keeps_what_is_probable_beside_the_best(logits, others):
    kept, full = weights(logits, min_p=0.3, **others), weights(logits, **others)
    for row, before in zip(kept, full, strict=True):
        chosen = torch.tensor([share >= 0.3 * before.max() for share in before])
        assert torch.equal(row > 0, chosen)
        assert torch.allclose(row[chosen], before[chosen] / before[chosen].sum())
    assert torch.equal(weights(logits, min_p=1.0) > 0, logits == logits.amax(1, keepdim=True))


def test_a_penalty_of_repetition_is_that_of_every_token_that_was_there(logits):
    sampler = TokenSampler(Sampling(seed=0, temperature=0, repetition_penalty=1e9), range(5))
    ranks = logits.sort(descending=True).indices
    drawn = []
    for _ in range(3):
        drawn.append(sampler(logits))
        sampler.note(drawn[-1][:, None])
    positive = logits.gather(1, ranks[:, :3]) > 0
    assert positive.all() and torch.equal(torch.stack(drawn, 1), ranks[:, :3])
    by_hand = logits.clone()
    for row, token in ((0, 3), (1, 5), (1, 6)):
        by_hand[row, token] *= 0.5 if by_hand[row, token] > 0 else 2.0
    sampler = TokenSampler(Sampling(seed=4, repetition_penalty=2.0), range(5))
    sampler.note(
        torch.tensor([[3, 9], [5, 6], [0, 0], [0, 0], [0, 0]]), torch.tensor([[1, 0], [1, 1], *[[0, 0]] * 3]) > 0
    )
    plain = TokenSampler(Sampling(seed=4), range(5))
    assert all(torch.equal(sampler(logits), plain(by_hand)) for _ in range(20))


def test_the_prompt_counts_and_forks_go_on(linear, prompt):
    greedy = {"temperature": 0.0, "repetition_penalty": 1e6}
    new = kinformer.generate(linear, prompt, max_new_tokens=12, **greedy)
    before = prompt
    for token in new.T:
        with torch.no_grad():
            logits = linear(before)[0][:, -1]
        was = torch.zeros_like(logits, dtype=torch.bool).scatter(1, before, True)
        by_hand = torch.where(was, torch.where(logits > 0, logits / 1e6, logits * 1e6), logits)
        assert torch.equal(token, by_hand.argmax(1))
        before = torch.cat([before, token[:, None]], 1)
    session = Session(linear, len(prompt), **greedy)
    session.feed(prompt)
    session.step()
    forked = session.fork(2)
    assert torch.equal(forked.step()[::2], session.step())


def test_draws_follow_the_probabilities(logits):
    sampler = TokenSampler(Sampling(seed=3, top_k=6), range(4000))
    drawn = sampler(logits[:1].expand(4000, -1))
    shares = torch.bincount(drawn, minlength=17) / 4000
    assert (shares - weights(logits[:1], top_k=6)[0]).abs().max() < 0.03


def test_excluded_tokens_are_never_drawn_even_at_the_ends_of_the_scale():
    logits = torch.full((2, 6), -torch.inf)
    logits[0, 2], logits[1, 5] = 0.0, 0.0
    for number in (0.0, 1 - 2.0**-48):
        sampler = TokenSampler(Sampling(seed=0), range(2))
        sampler._uniform = lambda device, number=number: torch.full((2, 1), number, dtype=torch.float64)
        assert sampler(logits).tolist() == [2, 5]


def test_tiny_temperatures_are_greedy(logits):
    assert torch.equal(TokenSampler(Sampling(temperature=1e-300, seed=0), range(5))(logits), logits.argmax(-1))


def test_a_stream_is_told_by_seed_index_and_count_only(logits):
    rows = logits[:1].expand(3, -1)
    together, alone = TokenSampler(Sampling(seed=7), [4, 0, 9]), TokenSampler(Sampling(seed=7), [9])
    pairs = [(together(rows)[2].item(), alone(rows[:1]).item()) for _ in range(600)]
    assert all(a == b for a, b in pairs)
    other = TokenSampler(Sampling(seed=8), [9])
    assert [a for a, _ in pairs] != [other(rows[:1]).item() for _ in range(600)]


def test_a_row_does_not_depend_on_its_neighbours(model, prompt):
    options = {"max_new_tokens": 30, "temperature": 1.2, "top_p": 0.95, "seed": 5}
    first = kinformer.generate(model, prompt, **options)
    changed = prompt.clone()
    changed[1:] = (changed[1:] + 3) % 17
    second = kinformer.generate(model, changed, **options)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(kinformer.generate(model, prompt[:1], **options), first[:1])


def test_seed_none_follows_the_global_generator(linear, prompt):
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(kinformer.generate(linear, prompt, max_new_tokens=20))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": -1.0}, "temperature is -1.0 but must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0 but must be 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0 but must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 0.0}, "min_p is 0.0 but must be above 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0 but must be a number above 0"),
        ({"seed": -1}, "seed is -1 but must be 0 or more"),
    ],
)
def test_wrong_options_are_told(linear, options, told):
    with pytest.raises(KinformerError, match=told):
        Session(linear, **options)


def test_a_text_is_refused_with_the_way_to_ids(linear):
    with pytest.raises(KinformerError, match="must hold ids.*encode texts by the run's tokenizer first"):
        kinformer.generate(linear, "hello")
