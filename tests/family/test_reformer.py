"""Reformer: what a token sees, and the limit in which that is all of the past."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.buckets import Hashes, LSHAttention
from kinformer.runtime.errors import KinformerError

DIM, TIME = 16, 23
WHOLE = LSHAttention.Config(num_heads=2, num_buckets=1, rounds=1, chunk_size=TIME)


def mixed(config, seed=0):
    """A mixer in float64 with weights that depend on the config's shapes only, its inputs, and its outputs."""
    torch.manual_seed(seed)
    mixer = config.build(DIM).double().eval()
    x = torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return mixer, x, mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))[0]


def over_all_pairs(mixer, x):
    """Softmax attention over the whole past, keys being normalised queries, oneself where there is no past."""
    q, v = mixer.qv(x).view(2, TIME, 2, 2, 8).permute(2, 0, 3, 1, 4)
    k = q / ((q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * 8**0.5)
    past = torch.ones(TIME, TIME, dtype=torch.bool).tril(-1)
    past[0, 0] = True
    weights = (q @ k.mT).masked_fill(~past, -torch.inf).softmax(-1)
    return mixer.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("chunk_size", [TIME, 12, 1000])
def test_one_bucket_that_holds_the_whole_length_is_attention_over_the_past(chunk_size):
    """Two chunks are seen, so that half the length is enough."""
    mixer, x, got = mixed(WHOLE.replace(chunk_size=chunk_size))
    with torch.no_grad():
        assert (got - over_all_pairs(mixer, x)).abs().max() < 1e-12


@pytest.mark.parametrize("change", [{"chunk_size": 11}, {"num_buckets": 2}])
def test_one_step_off_the_limit_outputs_differ(change):
    mixer, x, got = mixed(WHOLE.replace(**change))
    with torch.no_grad():
        assert (got - over_all_pairs(mixer, x)).abs().max() > 1e-4


def test_more_rounds_are_nearer_to_the_limit():
    """What a token sees of its past grows with the rounds that look for it."""
    errors = []
    for rounds in (1, 4, 16):
        mixer, x, got = mixed(WHOLE.replace(num_buckets=4, rounds=rounds))
        with torch.no_grad():
            errors.append(float((got - over_all_pairs(mixer, x)).norm()))
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]


def test_the_bucket_of_a_vector_is_the_nearest_direction():
    hashes = Hashes(2, 8, 3, 6)
    x = torch.randn(4, 2, 10, 8)
    turned = torch.einsum("bhtd,hdrk->bhrtk", x, hashes.rotations)
    assert torch.equal(hashes(x), torch.cat([turned, -turned], -1).argmax(-1))
    assert torch.equal(hashes(100 * x), hashes(x))


def test_only_what_a_later_token_can_see_is_kept_of_a_long_text():
    """And a text that goes on does so in constant memory."""
    config = LSHAttention.Config(num_heads=2, num_buckets=2, chunk_size=2, rounds=1)
    torch.manual_seed(0)
    mixer = config.build(DIM)
    assert mixer.retained == 6
    x = torch.randn(1, 400, DIM)
    with torch.no_grad():
        _, state = mixer(Chunk(x), mixer.initial_state(1))
        kept = (state.buckets > 0).sum(2).flatten()
        counts = state.counts.flatten(2)[0]
    assert torch.equal(kept, (counts % 2 + 2).sum(1))
    assert mixer.state_bytes(400) == mixer.state_bytes(10**9)


def test_generation_goes_on_where_a_text_ends():
    """Beyond what is kept: a token at a time is what one chunk gives."""
    model = kinformer.build("reformer", recipe="tiny", vocab_size=23).double().eval()
    tokens = torch.randint(23, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = model(tokens)
        parts, state = model(tokens[:, :70])
        for t in range(70, 90):
            logits, state = model(tokens[:, t : t + 1], state)
            parts = torch.cat([parts, logits], 1)
    assert (parts - whole).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_buckets": 3}, "num_buckets must be even"),
        ({"num_buckets": 0}, "num_buckets must be even"),
        ({"rounds": 0}, "rounds must be 1 or more, but is 0"),
        ({"rounds": 2}, "rounds = 2 of one bucket are all the same; use rounds = 1"),
        ({"chunk_size": 0}, "chunk_size must be 1 or more, but is 0"),
        ({"impl": "fast"}, "fast"),
    ],
)
def test_refusals(change, sentence):
    with pytest.raises(KinformerError, match=sentence):
        WHOLE.replace(**change)
