"""Memories of hidden states below a norm: they hold inputs as they enter the layer, and the norm reads them anew."""

import pytest
import torch

import kinformer
from kinformer.blocks.layer import DecoderLayer, ShaRnnLayer
from kinformer.blocks.residual import LayerNorm, PreNorm, RMSNorm
from kinformer.core.contract import Chunk
from kinformer.core.state import detach
from kinformer.mixers.compressive import Compressive, Convolution
from kinformer.mixers.memory import SegmentMemory
from kinformer.parts.positions import NoPosition
from kinformer.testing import MODEL_CHECKS, ModelSubject
from tests.mixers.made import DIM, inputs

SEGMENT, MEMORY, TIME = 4, 5, 19
LAYER_NORM = LayerNorm()
PLAIN = {"num_heads": 2, "segment": SEGMENT, "memory": MEMORY, "position": NoPosition.Config()}


def prenorm(mixer, norm=LAYER_NORM):
    torch.manual_seed(0)
    layer = DecoderLayer.Config(mixer=mixer, norm=norm, residual=PreNorm.Config()).build(DIM).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return layer


def absorbed(layer, x, sizes):
    """The stream after the mixer, however x is cut."""
    state, found = layer.initial_state(len(x), dtype=x.dtype), []
    for part in x.split(sizes, dim=1):
        y, state = layer._mix(Chunk(part), state)
        found.append(y)
    return torch.cat(found, 1), state


def authors(layer, x):
    """Their code segment by segment, densely: x + attend(norm(h), norm([sg(memory); h])) (Dai et al. 2019)."""
    mixer, norm, found = layer.mixer, layer.mixer_residual.norm, []
    for begin in range(0, x.shape[1], SEGMENT):
        h, memory = x[:, begin : begin + SEGMENT], x[:, max(0, begin - MEMORY) : begin].detach()
        q, _, _ = mixer.projection(norm(h))
        _, k, v = mixer.projection(norm(torch.cat([memory, h], 1)))
        ahead = torch.ones(h.shape[1], k.shape[2], dtype=torch.bool).triu(1 + memory.shape[1])
        weights = (q @ k.mT * mixer.score.scale).masked_fill(ahead, -torch.inf).softmax(-1)
        found.append(h + mixer.out((weights @ v).transpose(1, 2).flatten(2)))
    return torch.cat(found, 1)


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()])
@pytest.mark.parametrize("sizes", [[TIME], [1] * TIME, [5, 3, 8, 3], [SEGMENT] * 4 + [3]])
def test_outputs_and_gradients_are_those_of_the_formula(norm, sizes):
    """The norm learns from memory as from the segment; the gradient by the inputs ends at the segment's beginning."""
    layer = prenorm(SegmentMemory.Config(**PLAIN), norm)
    x = inputs(TIME).requires_grad_()
    leaves = [x, *layer.mixer_residual.parameters(), *layer.mixer.parameters()]
    y, want = absorbed(layer, x, sizes)[0], authors(layer, x)
    assert (y - want).abs().max() < 1e-12
    up = inputs(TIME, seed=5)
    for got, expected in zip(*(torch.autograd.grad((each * up).sum(), leaves) for each in (y, want)), strict=True):
        assert (got - expected).abs().max() < 1e-10
    own = torch.autograd.grad((authors(layer, x)[:, -3:] * up[:, -3:]).sum(), leaves[1])[0]
    with torch.no_grad():
        before = absorbed(layer, x[:, :-3], [TIME - 3])[1]
    late = torch.autograd.grad((layer._mix(Chunk(x[:, -3:]), before)[0] * up[:, -3:]).sum(), leaves[1])[0]
    assert (late - own).abs().max() < 1e-10, "also from a memory that was made without gradients"


@pytest.mark.parametrize("config", [SegmentMemory.Config(**PLAIN), Compressive.Config(**PLAIN | {"memory": 4})])
def test_memories_are_read_by_the_present_norm(config):
    """After a step of the optimiser, what follows a memory is as if the memory had been made by the new weights."""
    layer, x = prenorm(config), inputs(TIME)
    begun = detach(absorbed(layer, x[:, :10], [10])[1])
    with torch.no_grad():
        layer.mixer_residual.norm.weight.mul_(1.7)
        layer.mixer_residual.norm.bias.add_(0.4)
    late, _ = layer._mix(Chunk(x[:, 10:]), begun)
    assert (late - absorbed(layer, x, [TIME])[0][:, 10:]).abs().max() < 1e-12
    assert torch.equal(begun[0].hidden_states[:, 0], x[:, 10 - begun[0].hidden_states.shape[2] : 10])


def test_compression_costs_teach_the_compression_alone():
    """old, h, the norm and the projections are constants in the cost."""
    config = Compressive.Config(num_heads=2, segment=4, memory=4, compressed=4, compression=Convolution.Config(rate=2))
    layer, x = prenorm(config), inputs(TIME).requires_grad_()
    _, (state,) = absorbed(layer, x, [TIME])
    named = dict(layer.named_parameters()) | {"x": x}
    found = torch.autograd.grad(state.aux.sum(), list(named.values()), allow_unused=True)
    learns = {name for name, gradient in zip(named, found, strict=True) if gradient is not None and gradient.any()}
    assert learns == {"mixer.compression.product.weight", "mixer.compression.product.bias"}


def test_the_layer_of_sha_rnn_norms_memories_too():
    config = ShaRnnLayer.Config(mixer=SegmentMemory.Config(**PLAIN), norm=LayerNorm())
    layer, x = config.build(DIM).double(), inputs(10)
    _, (state,) = layer(Chunk(x), layer.initial_state(2, dtype=x.dtype))
    assert torch.equal(state.hidden_states[:, 0], x[:, -state.hidden_states.shape[2] :])


@pytest.mark.parametrize("check", ["partition", "padding", "ragged_reset", "reserved"])
@pytest.mark.parametrize("member", ["transformer-xl", "compressive"])
def test_laws_hold_below_a_norm(member, check):
    def make():
        return kinformer.build(member, recipe="tiny", vocab_size=17, set={"layers.*.residual": PreNorm.Config()})

    MODEL_CHECKS[check](ModelSubject(make, 17))
