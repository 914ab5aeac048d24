"""ETC's global-local attention: the contract, its limit, and a dense oracle written here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kinformer.core.encoder import SequenceContext
from kinformer.family.kinds import kinds
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.encoders import EtcAttention
from kinformer.parts.patterns.sequence import Window
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

MIXERS = {
    "all": {},
    "inputs": {"sharing": "inputs", "shared_output": True},
    "pieces": {"sharing": "pieces", "pattern": Window(window=3)},
    "hard": {"sharing": "pieces", "hard_g2l": True},
    "gaps": {"pattern": Window(window=3, dilations=(1, 2))},
    "a set": {"global_order": False, "ids": 20, "shared_output": True},
}


def config(**changes):
    return EtcAttention.Config(**{"num_heads": 2, "pattern": Window(window=5), "max_distance": 4} | changes)


COMPILED = ("all", "hard", "a set")
"""A graph takes seconds to make: those that differ from these in a size or a table are not compiled."""


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in MIXERS for check in ENCODER_CHECKS if check != "compile" or name in COMPILED],
)
def test_contract(name, check):
    impls = {"reference": lambda: config(**MIXERS[name], impl="reference").build(16)}
    subject = EncoderMixerSubject(lambda: config(**MIXERS[name]).build(16), impls=impls, global_tokens=False)
    ENCODER_CHECKS[check](subject)


def test_it_survives_files():
    from kinformer.core.config import from_dict, to_dict
    from kinformer.core.encoder import EncoderMixerConfig

    for changes in MIXERS.values():
        assert from_dict(EncoderMixerConfig, to_dict(config(**changes)), kinds(), "config") == config(**changes)


def weights(mixer, asks, seen):
    """Of a piece: the query, key and value weights with their biases."""
    width = mixer.config.num_heads * (mixer.out.in_features // mixer.config.num_heads)
    fused = mixer.projection.qkv if asks == "long" or mixer.config.sharing == "all" else mixer.projection.of_global.qkv
    query, rest = (fused.weight[:width], fused.bias[:width]), (fused.weight[width:], fused.bias[width:])
    if asks != seen and mixer.config.sharing == "pieces":
        own = mixer.projection.l2g if asks == "long" else mixer.projection.g2l
        rest = own.weight, own.bias
    return query, (rest[0][:width], rest[1][:width]), (rest[0][width:], rest[1][width:])


def same_sentence(sentences, row, i, j):
    return sentences is not None and bool(sentences[row, i] == sentences[row, j])


def relation(mixer, row, i, j, sentences):
    """The id of the key j for the query i; tokens of the global input have numbers below 0, as -count ... -1."""
    far = mixer.config.max_distance
    if (i < 0) != (j < 0):
        return 2 * far + 1 + same_sentence(sentences, row, i, j)
    if i < 0 and not mixer.config.global_order:
        return 0 if i == j else 2 * far + 3
    return min(j - i, far) if j >= i else far + min(i - j, far)


def dense(mixer, x, text):
    """All keys of a query side by side, the scores of their relations gathered, one softmax."""
    count, heads = text.num_global, mixer.config.num_heads
    head_dim = mixer.out.in_features // heads
    time = x.shape[1] - count
    # Index -count ... time - 1: the global tokens are the last rows of these views, as Python counts.
    turned = x.roll(-count, 1)
    sentences = None if text.sentences is None else text.sentences.roll(-count, 1)
    outputs = []
    for row in range(len(x)):
        valid = torch.ones(count + time, dtype=torch.bool) if text.valid is None else text.valid[row].roll(-count)
        results = []
        for i in range(-count, time):
            if not valid[i]:
                results.append(x.new_zeros(x.shape[-1]))
                continue
            asks = "global" if i < 0 else "long"
            seen = [
                j
                for j in range(-count, time)
                if valid[j] and (i < 0 or j < 0 or abs(i - j) <= mixer.config.pattern.window)
                if not (
                    mixer.config.hard_g2l
                    and i < 0 <= j
                    and (sentences is None or sentences[row, i] != sentences[row, j])
                )
            ]
            keys, values = [], []
            for j in seen:
                _, k, v = weights(mixer, asks, "global" if j < 0 else "long")
                keys.append(torch.nn.functional.linear(turned[row, j], *k))
                values.append(torch.nn.functional.linear(turned[row, j], *v))
            q = torch.nn.functional.linear(turned[row, i], *weights(mixer, asks, asks)[0])
            q, k, v = (each.view(-1, heads, head_dim) for each in (q, torch.stack(keys), torch.stack(values)))
            table = mixer.global_relations if i < 0 else mixer.relations
            ids = torch.tensor([relation(mixer, row, i, j, sentences) for j in seen])
            moved = torch.einsum("xhd,jhd->jh", q, table.keys[ids]) + table.bias[ids]
            scores = (torch.einsum("xhd,jhd->jh", q, k) + moved) * head_dim**-0.5
            y = torch.einsum("jh,jhd->hd", scores.softmax(0), v).flatten()
            results.append(((i < 0 and mixer.global_out) or mixer.out)(y))
        outputs.append(torch.stack(results))
    return torch.stack(outputs)


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(set(MIXERS) - {"gaps"})),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 14), st.integers(0, 5)),
    ragged=st.booleans(),
    given_sentences=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_what_the_dense_oracle_says(name, sizes, ragged, given_sentences, seed):
    torch.manual_seed(seed)
    batch, time, num_global = sizes
    mixer = config(**MIXERS[name] | {"pattern": Window(window=seed % 7)}).build(8).double()
    for table in (mixer.relations, mixer.global_relations):
        torch.nn.init.normal_(table.bias)
    x = torch.randn(batch, num_global + time, 8, dtype=torch.float64, requires_grad=True)
    numbers = torch.arange(num_global).expand(batch, -1)
    sentences = (
        torch.cat([numbers, torch.randint(-1, max(num_global, 1), (batch, time))], 1) if given_sentences else None
    )
    valid = None
    if ragged:
        lengths, own = torch.randint(1, time + 1, (batch, 1)), torch.randint(0, num_global + 1, (batch, 1))
        valid = torch.cat([numbers < own, torch.arange(time).expand(batch, -1) < lengths], 1)
    text = SequenceContext(valid, None, sentences, num_global)
    aim = torch.randn(batch, num_global + time, 8, dtype=torch.float64)
    leaves = [x, *mixer.parameters()]
    found = []
    for y in (mixer(x, text), dense(mixer, x, text)):
        found.append((y, torch.autograd.grad((y * aim).sum(), leaves, allow_unused=True, materialize_grads=True)))
    (got, gradients), (want, wanted) = found
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def limit(window):
    """ETC with relations of nothing and plain attention with the same weights, on inputs of 3 and 12 tokens."""
    torch.manual_seed(0)
    mixer = config(pattern=Window(window=window), shared_output=True).build(16).double()
    for table in (mixer.relations, mixer.global_relations):
        torch.nn.init.zeros_(table.keys)
    plain = BidirectionalAttention.Config(num_heads=2).build(16).double()
    plain.load_state_dict({k: v for k, v in mixer.state_dict().items() if k in plain.state_dict()})
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    return mixer(x, SequenceContext(num_global=3)), plain(x)


def test_a_window_of_the_whole_text_and_no_relations_are_plain_attention():
    got, want = limit(11)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    short, _ = limit(10)
    assert (short - want).abs().max() > 1e-4
    torch.testing.assert_close(short[:, :3], want[:, :3], rtol=0, atol=1e-12)  # the global input sees all in any case


def test_relations_and_units_tell():
    """Each of: the order of the long input, of the global one, and which sentence is whose."""
    torch.manual_seed(0)
    x = torch.randn(1, 3 + 12, 16, dtype=torch.float64)
    sentences = torch.cat([torch.arange(3), torch.arange(12) // 4])[None]
    mixer = config(pattern=Window(window=12)).build(16).double()
    with torch.no_grad():
        base = mixer(x, SequenceContext(sentences=sentences, num_global=3))
        order = torch.cat([torch.arange(3), torch.tensor([4, 3, *range(5, 15)])])
        assert (
            mixer(x[:, order], SequenceContext(sentences=sentences, num_global=3))[:, order] - base
        ).abs().max() > 1e-3
        order = torch.tensor([1, 0, 2, *range(3, 15)])
        swapped = mixer(x[:, order], SequenceContext(sentences=sentences[:, order], num_global=3))[:, order]
        torch.testing.assert_close(swapped[:, 3:], base[:, 3:], rtol=0, atol=1e-12)
        assert (swapped[:, :2] - base[:, :2]).abs().max() > 1e-3
        crowd = config(pattern=Window(window=12), global_order=False).build(16).double()
        swapped = crowd(x[:, order], SequenceContext(sentences=sentences[:, order], num_global=3))[:, order]
        torch.testing.assert_close(
            swapped, crowd(x, SequenceContext(sentences=sentences, num_global=3)), rtol=0, atol=1e-12
        )
        other = torch.cat([torch.arange(3), torch.arange(12) // 6])[None]
        assert (mixer(x, SequenceContext(sentences=other, num_global=3)) - base).abs().max() > 1e-3


def test_hard_masks_shut_one_direction_only():
    torch.manual_seed(0)
    x = torch.randn(1, 3 + 12, 16, dtype=torch.float64)
    text = SequenceContext(sentences=torch.cat([torch.arange(3), torch.arange(12) // 4])[None], num_global=3)
    for hard, seen in ((True, 4), (False, 12)):
        mixer = config(pattern=Window(window=0), hard_g2l=hard).build(16).double()
        rows = torch.autograd.functional.jacobian(lambda x, mixer=mixer: mixer(x, text)[0].sum(-1), x)[:, 0]
        sees = rows.abs().amax(-1) > 0
        assert sees[0, 3:].sum() == seen  # the first global token
        assert sees[3, :3].all()  # the first of the long input
        assert sees[3, 3:].sum() == 1


def test_work_and_memory_are_linear_in_length():
    counts, kept = [], []
    for time in (1024, 2048):
        with torch.device("meta"):
            mixer = config(pattern=Window(window=32)).build(16)
            x = torch.zeros(1, 8 + time, 16)
        saved = {}

        def keep(tensor, saved=saved):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = (storage, storage.nbytes())
            return tensor

        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            mixer(
                x, SequenceContext(sentences=torch.zeros(1, 8 + time, dtype=torch.int64, device="meta"), num_global=8)
            )
        counts.append(counter.get_total_flops())
        kept.append(sum(size for _, size in saved.values()))
    assert counts[1] < 2.1 * counts[0]
    assert kept[1] < 2.1 * kept[0]


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(KinformerError, match="ids must be 12 or more for max_distance = 4, but is 9"):
        config(ids=9)
    with pytest.raises(KinformerError, match="max_distance must be 0 or more, but is -1"):
        config(max_distance=-1)
    with pytest.raises(KinformerError, match="is for 3 heads, but the mixer has 2"):
        config(pattern=Window(dilations=(1, 2, 3))).build(16)
    with pytest.raises(KinformerError, match="marked as global"):
        config().build(16)(
            torch.zeros(1, 4, 16), SequenceContext(global_positions=torch.zeros(1, 1, dtype=torch.int64))
        )
