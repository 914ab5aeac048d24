"""A model made without memory, then given memory and weights, is the model: nothing is left unset."""

import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.lab.estimation.parts import outputs

from .values import values_of

CASES = {name: (name, {}) for name in MEMBERS} | {
    "quadratic": ("linear-transformer", {"layers.*.mixer.feature_map": "quadratic"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_meta_model_is_filled_by_its_weights(case):
    name, changes = CASES[case]
    torch.manual_seed(0)
    config = configure(name, "tiny", set=changes)
    model = config.build().eval()
    with torch.device("meta"):
        other = config.build().eval()
    other = other.to_empty(device="cpu")
    for each in (*other.parameters(), *other.buffers()):
        each.data.fill_(-7)
    other.load_state_dict(model.state_dict(), strict=True)
    values = values_of(model, 2, 70)
    with torch.no_grad():
        got, want = (outputs(each, values)[0] for each in (other, model))
    assert torch.equal(got, want)


def test_transformer_xl_sees_weights_that_change_through_data():
    torch.manual_seed(0)
    model = kinformer.build("transformer-xl", recipe="tiny", vocab_size=64).eval()
    tokens = torch.randint(64, (1, 30))
    with torch.no_grad():
        before = model(tokens)[0]
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        after = model(tokens)[0]
    fresh = kinformer.build("transformer-xl", recipe="tiny", vocab_size=64).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(after, fresh(tokens)[0]) and (after - before).abs().max() > 1e-3
