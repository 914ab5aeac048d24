"""What a state loses when the weights change."""

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
