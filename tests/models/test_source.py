"""A decoder whose layers also look at a source: projected once into the state, then the contract is as ever."""

import pytest
import torch

import kinformer
from kinformer.core.state import difference
from kinformer.mixers.cross import CrossAttention

DIM, LENGTH = 32, 7
CROSS = {"layers.*.further_mixers": [{"kind": "cross", "num_heads": 2}]}


def build(**changes):
    torch.manual_seed(0)
    return kinformer.build("gpt", recipe="tiny", vocab_size=23, set=CROSS | changes).double().eval()


def source(batch=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, LENGTH, DIM, generator=generator, dtype=torch.float64)
    return x, torch.arange(LENGTH) < torch.tensor([[LENGTH], [4]])[:batch]


def test_every_layer_has_two_mixers_and_their_states():
    model = build()
    x, valid = source()
    state = model.initial_state(2, source=x, source_valid=valid)
    assert all(len(layer) == 2 for layer in state.layers)
    assert isinstance(model.stack.units[0].mixers[1], CrossAttention)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_chunks_of_any_length_give_the_same(cut):
    model, tokens = build(), torch.randint(23, (2, 12))
    x, valid = source()
    begin = model.initial_state(2, source=x, source_valid=valid)
    whole, end = model(tokens, begin)
    left, middle = model(tokens[:, :cut], begin)
    right, last = model(tokens[:, cut:], middle)
    assert (torch.cat([left, right], 1) - whole).abs().max() < 1e-12
    assert difference(end, last) < 1e-12


def test_the_source_is_seen_and_its_padding_is_not():
    model, tokens = build(), torch.randint(23, (2, 6))
    x, valid = source()
    given = model(tokens, model.initial_state(2, source=x, source_valid=valid))[0]
    spoiled = torch.where(valid[..., None], x, torch.nan)
    assert torch.equal(model(tokens, model.initial_state(2, source=spoiled, source_valid=valid))[0], given)
    other = model(tokens, model.initial_state(2, source=x + 1, source_valid=valid))[0]
    assert (other - given).abs().amax((1, 2)).min() > 1e-3


def test_without_a_source_it_is_refused():
    with pytest.raises(kinformer.runtime.errors.KinformerError, match="nothing to look at"):
        build()(torch.randint(23, (2, 6)))
