"""Segment memory: its authors' numbers, the paper's equations, limits, and what carries gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.core.attention_state import ReservedSlots
from kinformer.core.contract import Chunk
from kinformer.core.state import nbytes, reserve
from kinformer.mixers.memory import SegmentMemory
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.positions import sinusoids
from kinformer.parts.projections import Convolved, MultiHead
from kinformer.parts.relative_positions import Rope, TransformerXL
from kinformer.runtime.errors import KinformerError
from tests.mixers.made import DIM, built, inputs

GOLDEN = Path(__file__).parents[1] / "golden" / "transformer_xl.npz"


def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def outputs(mixer, x, sizes=None):
    state, found = mixer.initial_state(len(x), dtype=x.dtype), []
    for part in x.split(sizes or [x.shape[1]], dim=1):
        y, state = mixer(Chunk(part), state)
        found.append(y)
    return torch.cat(found, dim=1)


def published_weights(arrays):
    """The weights of the authors' model under our names."""
    weights = {
        "input.embedding.weight": arrays["w.word_emb.emb_layers.0.weight"],
        "head.bias": arrays["w.crit.out_layers.0.bias"],
        "stack.shared.0.content": arrays["w.r_w_bias"],
        "stack.shared.0.position": arrays["w.r_r_bias"],
    }
    names = {
        "mixer.projection.qkv.weight": "dec_attn.qkv_net.weight",
        "mixer.position.projection.weight": "dec_attn.r_net.weight",
        "mixer.out.weight": "dec_attn.o_net.weight",
        "mixer_residual.norm.weight": "dec_attn.layer_norm.weight",
        "mixer_residual.norm.bias": "dec_attn.layer_norm.bias",
        "feed_forward_residual.norm.weight": "pos_ff.layer_norm.weight",
        "feed_forward_residual.norm.bias": "pos_ff.layer_norm.bias",
        "feed_forward.up.weight": "pos_ff.CoreNet.0.weight",
        "feed_forward.up.bias": "pos_ff.CoreNet.0.bias",
        "feed_forward.down.weight": "pos_ff.CoreNet.3.weight",
        "feed_forward.down.bias": "pos_ff.CoreNet.3.bias",
    }
    for layer in (0, 1):
        weights |= {
            f"stack.layers.{layer}.{ours}": arrays[f"w.layers.{layer}.{theirs}"] for ours, theirs in names.items()
        }
    return weights


@pytest.mark.parametrize("cut", ["a segment at a time", "all at once"])
def test_model_is_that_of_its_authors(cut):
    """Three segments: logits of all, and the gradients of the last one's loss, to which its memory is a constant."""
    arrays = golden()
    changes = {
        "dim": 16,
        "layers.*.feed_forward.hidden_dim": 24,
        "layers.*.mixer.segment": 5,
        "layers.*.mixer.memory": 7,
    }
    model = kinformer.build("transformer-xl", recipe="tiny", vocab_size=23, set=changes).double()
    model.load_state_dict(published_weights(arrays))
    tokens, targets = ([arrays[f"in.seg{i}.{kind}"].T for i in range(3)] for kind in ("data", "target"))
    if cut == "all at once":
        logits = model(torch.cat(tokens, dim=1))[0].split(5, dim=1)
    else:
        with torch.no_grad():
            first, state = model(tokens[0])
            second, state = model(tokens[1], state)
        logits = first, second, model(tokens[2], state)[0]
    for index in range(3):
        assert (logits[index].transpose(0, 1) - arrays[f"out.seg{index}.logits"]).abs().max() < 1e-12
    cross_entropy(logits[2].flatten(0, 1), targets[2].flatten(), reduction="sum").backward()
    biases, layer = model.stack.shared[0], model.stack.layers[0].mixer
    for parameter, name in (
        (biases.content, "r_w_bias"),
        (biases.position, "r_r_bias"),
        (layer.position.projection.weight, "layers.0.dec_attn.r_net.weight"),
        (layer.projection.qkv.weight, "layers.0.dec_attn.qkv_net.weight"),
    ):
        want = arrays[f"grad.seg2.{name}"]
        assert (parameter.grad - want).abs().max() < 1e-7 * max(1, want.abs().max())


def hidden(queries, memories, memory, same_length):
    """[queries, memories + queries] bool, as the authors mask a segment after so many memories, at most ``memory``."""
    later = torch.ones(queries, memories + queries).triu(1 + memories).bool()
    if not same_length:
        return later
    full = memories + queries - memory
    return later | torch.ones_like(later).tril(-(queries - full if full > 0 else queries))


def plainly(mixer, x, segment, memory, same_length=False, clamp=None):
    """The paper's equations, segment after segment, with dense scores."""
    heads, width, time = 2, DIM // 2, x.shape[1]
    biases, rows = mixer.position.biases, sinusoids(torch.arange(time), DIM, 10000.0)
    table = mixer.position.projection(rows).view(time, heads, width)
    found = []
    for start in range(0, time, segment):
        own = x[:, start : start + segment]
        whole = torch.cat([x[:, max(0, start - memory) : start].detach(), own], dim=1)
        q, k, v = mixer.projection.qkv(whole).view(len(x), -1, 3, heads, width).unbind(2)
        q = q[:, -own.shape[1] :]
        query = torch.arange(whole.shape[1] - own.shape[1], whole.shape[1])
        distance = query[:, None] - torch.arange(whole.shape[1])
        content = torch.einsum("bihd,bjhd->bhij", q + biases.content, k)
        place = torch.einsum("bihd,ijhd->bhij", q + biases.position, table[distance.clamp(0, clamp)])
        unseen = hidden(own.shape[1], whole.shape[1] - own.shape[1], memory, same_length)
        weights = ((content + place) / width**0.5).masked_fill(unseen, -torch.inf).softmax(-1)
        found.append(mixer.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("clamp", [None, 2])
@pytest.mark.parametrize(
    ("segment", "memory", "same_length"),
    [(5, 3, False), (4, 11, False), (6, 6, False), (7, 0, False), (1, 4, False)]
    + [(5, 3, True), (4, 11, True), (6, 6, True), (9, 1, True), (1, 4, True)],
)
def test_values_and_gradients_are_those_of_the_paper(segment, memory, same_length, clamp):
    config = SegmentMemory.Config(num_heads=2, segment=segment, memory=memory, same_length=same_length)
    mixer, weights = built(config.replace(position=TransformerXL.Config(clamp=clamp))), inputs(23, seed=3)
    gradients, values = [], []
    for how in (lambda x: outputs(mixer, x), lambda x: plainly(mixer, x, segment, memory, same_length, clamp)):
        x = inputs(23).requires_grad_()
        y = how(x)
        values.append(y)
        gradients.append(torch.autograd.grad((y * weights).sum(), [x, *mixer.parameters()]))
    assert (values[0] - values[1]).abs().max() < 1e-11
    for got, want in zip(*gradients, strict=True):
        assert (got - want).abs().max() < 1e-10 * max(1, want.abs().max())


def exact(memory, segment):
    """Segment memory, and plain attention with the same weights."""
    mixer = built(SegmentMemory.Config(num_heads=2, segment=segment, memory=memory))
    plain = SoftmaxAttention.Config(
        num_heads=2, projection=MultiHead.Config(bias=False), position=TransformerXL.Config(), bias=False
    ).build(DIM)
    plain = plain.double()
    plain.load_state_dict(mixer.state_dict())
    return mixer, plain


@pytest.mark.parametrize("segment", [12, 100])
def test_no_memory_and_one_segment_is_exact_attention(segment):
    mixer, plain = exact(0, segment)
    gradients = []
    for each in (mixer, plain):
        x = inputs(12).requires_grad_()
        y = outputs(each, x)
        gradients.append((y, *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])))
    assert all((got - want).abs().max() < 1e-10 for got, want in zip(*gradients, strict=True))


def test_memory_of_the_whole_length_is_exact_attention_in_values():
    x, places = inputs(12).requires_grad_(), slice(8, 12)
    want = outputs(exact(8, 4)[1], x)
    for memory in (8, 50):
        got = outputs(exact(memory, 4)[0], x)
        assert (got - want).abs().max() < 1e-12
    short = outputs(exact(7, 4)[0], x)
    assert (short[:, :8] - want[:, :8]).abs().max() < 1e-12
    assert (short[:, 8:] - want[:, 8:]).abs().max() > 1e-4
    one_segment_less = outputs(exact(0, 11)[0], x)
    assert (one_segment_less[:, 11] - want[:, 11]).abs().max() > 1e-4
    (of_plain,) = torch.autograd.grad(want[:, places].square().sum(), x)
    (of_memory,) = torch.autograd.grad(got[:, places].square().sum(), x)
    assert of_plain[:, :8].abs().max() > 1e-3
    assert not of_memory[:, :8].any()
    assert of_memory[:, 8:].any()


def test_projections_learn_from_memory_alone():
    """A query whose own segment gives keys no gradient: what is left comes from memory."""
    mixer = built(SegmentMemory.Config(num_heads=2, segment=4, memory=4))
    x = inputs(5)
    _, state = mixer(Chunk(x[:, :4]), mixer.initial_state(2, dtype=torch.float64))
    y, _ = mixer(Chunk(x[:, 4:]), state)
    y.sum().backward()
    alone = SegmentMemory.Config(num_heads=2, segment=4, memory=0)
    without = built(alone)
    z, _ = without(Chunk(x[:, 4:]), without.initial_state(2, dtype=torch.float64))
    z.sum().backward()
    keys = slice(DIM, 2 * DIM)
    assert not without.projection.qkv.weight.grad[keys].any()  # one key has all of the probability, whatever it is
    assert mixer.projection.qkv.weight.grad[keys].abs().max() > 1e-4


def test_a_state_holds_no_graph_of_segments_that_are_over():
    mixer = built(SegmentMemory.Config(num_heads=2, segment=4, memory=8))
    state = mixer.initial_state(1, dtype=torch.float64)
    first = inputs(4, batch=1).requires_grad_()
    _, state = mixer(Chunk(first), state)
    second = inputs(3, batch=1, seed=2).requires_grad_()
    _, state = mixer(Chunk(second), state)
    gradients = torch.autograd.grad(state.hidden_states.sum(), [first, second], allow_unused=True)
    assert gradients[0] is None or not gradients[0].any()
    assert gradients[1].all()


def test_memory_is_kept_projected_without_gradients_only():
    mixer = built(SegmentMemory.Config(num_heads=2, segment=4, memory=6))
    x = inputs(20)
    _, with_graph = mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))
    with torch.no_grad():
        _, without = mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))
        assert (with_graph.k.shape[2], without.k.shape[2], without.hidden_states.shape[2]) == (0, 9, 9)
        want, _ = mixer(Chunk(inputs(9, seed=4)), without)
        got, after = mixer(Chunk(inputs(9, seed=4)), with_graph)
        assert (got - want).abs().max() < 1e-12
        assert after.k.shape[2] == 9
        assert isinstance(reserve(without, 5), ReservedSlots)
        assert reserve(with_graph, 5) is with_graph


def test_generation_runs_in_constant_memory():
    mixer = built(SegmentMemory.Config(num_heads=2, segment=5, memory=6))
    x, held = inputs(300), []
    with torch.no_grad():
        want = outputs(mixer, x)
        state = reserve(mixer.initial_state(2, dtype=torch.float64), 300)
        for index in range(300):
            y, state = mixer(Chunk(x[:, index : index + 1]), state)
            assert (y[:, 0] - want[:, index]).abs().max() < 1e-12
            held.append(nbytes(state))
    assert len(set(held)) == 1


def test_only_needed_tokens_are_projected_again(monkeypatch):
    """Chunks of whole segments: the memory, with keys and values but no queries, and nothing twice."""
    mixer, sizes = built(SegmentMemory.Config(num_heads=2, segment=8, memory=12)), []
    keys_values = mixer.projection.keys_values
    monkeypatch.setattr(mixer.projection, "keys_values", lambda x: sizes.append(x.shape[1]) or keys_values(x))
    outputs(mixer, inputs(40), [8] * 5)
    assert sizes == [8, 12, 12, 12]
    sizes.clear()
    with torch.no_grad():
        outputs(mixer, inputs(40), [8] * 5)
    assert sizes == []


def test_every_token_sees_as_many():
    """Of the last ``memory`` tokens, itself among them, whatever its place in the segment."""
    mixer, x = built(SegmentMemory.Config(num_heads=2, segment=5, memory=7, same_length=True)), inputs(24)
    for last in (14, 17, 19):
        y = outputs(mixer, x)[:, last]
        for key in range(24):
            other = x.clone()
            other[:, key] += 1
            assert bool((outputs(mixer, other)[:, last] != y).any()) == (last - 7 < key <= last)


def test_evaluates_as_the_authors_do():
    """Equally many keys and a limit to distances change no weights."""
    trained = kinformer.build("transformer-xl", recipe="tiny", vocab_size=23)
    changes = {"segment": 2, "memory": 15, "same_length": True, "position.clamp": 6}
    other = kinformer.build(
        "transformer-xl",
        recipe="tiny",
        vocab_size=23,
        set={f"layers.*.mixer.{name}": value for name, value in changes.items()},
    )
    other.load_state_dict(trained.state_dict())
    tokens = torch.randint(23, (1, 40))
    with torch.no_grad():
        got, want = other(tokens)[0], trained(tokens)[0]
    assert torch.allclose(got[:, :7], want[:, :7], atol=1e-5)
    assert not torch.allclose(got[:, 39], want[:, 39], atol=1e-5)


def test_evaluates_with_another_memory():
    trained = kinformer.build("transformer-xl", recipe="tiny", vocab_size=23)
    wider = kinformer.build("transformer-xl", recipe="tiny", vocab_size=23, set={"layers.*.mixer.memory": 40})
    wider.load_state_dict(trained.state_dict())
    tokens = torch.randint(23, (1, 40))
    with torch.no_grad():
        got, want = wider(tokens)[0], trained(tokens)[0]
    assert torch.allclose(got[:, :16], want[:, :16], atol=1e-5)
    assert not torch.allclose(got[:, 39], want[:, 39], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment": 0}, "segment must be 1 or more"),
        ({"memory": -1}, "memory must be 0 or more"),
        ({"memory": 0, "same_length": True}, "memory is 0"),
        ({"impl": "flex"}, "flex"),
    ],
)
def test_refuses_sizes_that_mean_nothing(options, message):
    with pytest.raises(KinformerError, match=message):
        SegmentMemory.Config(**options)


def test_refuses_projections_with_a_context():
    with pytest.raises(KinformerError, match="looks at earlier tokens"):
        SegmentMemory.Config(projection=Convolved.Config()).build(DIM)


def test_positions_that_turn_keys_are_told_where_memory_stands():
    """Rotary positions after a reset in mid-chunk, against the sequences alone."""
    mixer, x = built(SegmentMemory.Config(num_heads=2, segment=4, memory=6, position=Rope.Config())), inputs(20)
    reset = torch.zeros(2, 20, dtype=torch.bool)
    reset[:, 7] = True
    got, _ = mixer(Chunk(x, None, reset), mixer.initial_state(2, dtype=torch.float64))
    want = torch.cat([outputs(mixer, x[:, :7]), outputs(mixer, x[:, 7:])], dim=1)
    assert (got - want).abs().max() < 1e-12
