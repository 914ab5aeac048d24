"""What a state loses when the weights change."""

import pytest
import torch

import kinformer
from kinformer.core import state as states


def test_a_renewed_state_holds_what_the_weights_did_not_make():
    """Keys and values of hidden states that are there too have no slots, and slots that no row has filled are gone."""
    model = kinformer.build("gtrxl", recipe="tiny", set={"layers.*.mixer.segment": 8, "layers.*.mixer.memory": 8})
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    reset = torch.zeros(2, 12, dtype=torch.bool)
    reset[0, 9], reset[1, 5] = True, True
    with torch.no_grad():
        _, state = model(tokens, reset=reset)
        renewed = states.renewed(state)
        assert states.form(renewed) == states.form(state)
        for layer in renewed.layers:
            (own,) = layer
            assert (own.hidden_states.shape[2], own.k.shape[2], own.v.shape[2]) == (7, 0, 0)
        one, other = (model(tokens[:, :3], each)[0] for each in (state, renewed))
    assert torch.allclose(one, other, atol=1e-6)
    assert states.renewed(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("member", ["transformer-xl", "compressive"])
def test_rows_whose_projections_are_gone_join_others_that_have_theirs(member):
    """By hand, and in a chunk that holds no token of some rows; what is derived is then made again of all rows."""
    model = kinformer.build(member, recipe="tiny").eval()
    tokens = torch.randint(256, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = model(tokens[:, :70])
        want, _ = model(tokens[:, 70:], state)
        one, other = (states.select_rows(state, torch.tensor([row])) for row in (0, 1))
        got, _ = model(tokens[:, 70:], states.join_rows([one, states.renewed(other)]))
        assert torch.allclose(got, want, atol=1e-5)

        valid = torch.tensor([[False], [True]]).expand(2, 10)
        _, ragged = model(tokens[:, 70:80], states.renewed(state), valid=valid)
        got, _ = model(tokens[:1, 70:], states.select_rows(ragged, torch.tensor([0])))
    assert torch.allclose(got, want[:1], atol=1e-5)
