"""Sinkhorn attention for decoders: the contract, its formula, its limit, and that it does not know the future."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.sinkhorn import CausalSinkhornAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, inputs

SMALL = CausalSinkhornAttention.Config(num_heads=2, block=5, max_length=60)


def made(config, spread=1.0):
    """In float64 and eval mode; ``spread``: how unlike the sort logits are."""
    torch.manual_seed(0)
    mixer = config.build(DIM).double().eval()
    mixer.outer.weight.data.mul_(spread)
    return mixer


def outputs(mixer, x, **masks):
    return mixer(Chunk(x, **masks), mixer.initial_state(len(x), dtype=x.dtype))[0]


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check):
    impls = {"reference": lambda: SMALL.replace(impl="reference").build(DIM)}
    CHECKS[check](MixerSubject(lambda: SMALL.build(DIM), dim=DIM, impls=impls))


def balanced(logits, iterations):
    found = logits.exp()
    for _ in range(iterations):
        found = found / found.sum(1, keepdim=True)
        found = found / found.sum(0, keepdim=True)
    return found


def by_formula(mixer, x):
    """One text [time, dim], head by head and token by token."""
    config, heads = mixer.config, []
    q, k, v = (each[0] for each in mixer.projection(x[None]))
    size = config.block
    for head in range(config.num_heads):
        rows = []
        for t in range(len(x)):
            i, begin = t // size, t // size * size
            keys, values = k[head, begin : t + 1], v[head, begin : t + 1]
            if i:
                before = torch.stack([x[: size * r].sum(0) for r in range(1, i + 1)])
                logits = mixer.outer(mixer.inner(before).relu()).unflatten(1, (config.num_heads, -1))[:, head, :i]
                weights = balanced(logits / config.temperature, config.iterations)[-1]
                earlier = [part[head, :begin].unflatten(0, (i, size)) for part in (k, v)]
                brought = [torch.einsum("j,jsd->sd", weights, part) for part in earlier]
                keys, values = torch.cat([brought[0], keys]), torch.cat([brought[1], values])
            rows.append((q[head, t] @ keys.T * mixer.scale).softmax(0) @ values)
        heads.append(torch.stack(rows))
    return mixer.out(torch.cat(heads, -1))


@pytest.mark.parametrize("time", [27, 20, 3])
def test_it_is_its_formula(time):
    mixer, x = made(SMALL, spread=4.0), inputs(time)
    want = torch.stack([by_formula(mixer, row) for row in x])
    torch.testing.assert_close(outputs(mixer, x), want, rtol=0, atol=1e-12)


def test_sequences_of_a_chunk_are_those_alone():
    mixer, x = made(SMALL, spread=4.0), inputs(40)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[0, [0, 13, 14]] = reset[1, 22] = True
    got = outputs(mixer, x, reset=reset)
    for row, cuts in ((0, (13, 1, 26)), (1, (22, 18))):
        want = torch.cat([outputs(mixer, part[None])[0] for part in x[row].split(cuts)])
        torch.testing.assert_close(got[row], want, rtol=0, atol=1e-12)


def test_two_blocks_are_exact_attention():
    """The second block's past is the first one, which its ranking brings whole."""
    mixer, x = made(SMALL), inputs(15)
    plain = SoftmaxAttention.Config(num_heads=2).build(DIM).double()
    plain.load_state_dict(mixer.state_dict(), strict=False)
    gaps = (outputs(mixer, x) - outputs(plain, x)).detach().abs().amax((0, 2))
    assert gaps[:10].max() < 1e-12 and gaps[10:].min() > 1e-4


def test_what_a_block_takes_knows_no_later_one():
    """Where the published balancing leaks (tests/mixers/test_sinkhorn.py), nothing that comes later has a part."""
    mixer, x = made(SMALL, spread=4.0), inputs(40)
    later = x.clone()
    later[:, 20:] *= 9
    torch.testing.assert_close(outputs(mixer, later)[:, :20], outputs(mixer, x)[:, :20], rtol=0, atol=0)


def test_a_model_streams_and_its_noise_is_of_training_alone():
    model = kinformer.build("sinkhorn", recipe="tiny-causal", vocab_size=23).double().eval()
    tokens = torch.randint(23, (2, 50), generator=torch.Generator().manual_seed(3))
    whole, _ = model(tokens)
    state, parts = None, []
    for part in tokens.split([17, 1, 1, 31], 1):
        logits, state = model(part, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)
    assert not torch.equal(model.train()(tokens)[0], whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SMALL.replace(block=0), "block must be 1 or more, but is 0"),
        (lambda: SMALL.replace(block=7), "max_length = 60 is not a multiple of block = 7"),
        (lambda: SMALL.replace(temperature=0.0), "temperature"),
        (lambda: outputs(made(SMALL), inputs(61)), "61 tokens, but the mixer causal_sinkhorn ends at max_length = 60"),
    ],
)
def test_what_does_not_fit_is_one_sentence(make, message):
    with pytest.raises(KinformerError, match=message):
        make()
