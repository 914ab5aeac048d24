"""Packed weights change speed, not meaning."""

import pytest
import torch

import kinformer
from kinformer.core import state as states
from kinformer.generation.packed import PackedLinear, can_pack, pack

from ..family.values import values_of


@pytest.mark.parametrize("name", [member.name for member in kinformer.members() if member.causal])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_the_same_logits_and_state(name, dtype, tolerance):
    torch.manual_seed(0)
    model = kinformer.build(name, recipe="tiny").eval().to(dtype)
    if not can_pack(model):
        pytest.skip("this machine or build of PyTorch has no packed products")
    packed = pack(model, rows=3)
    products = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == products > 0
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    tokens = values_of(model, 3, 20)
    with torch.no_grad():
        expected, state = model(tokens)
        first, middle = packed(tokens[:, :13])
        last, end = packed(tokens[:, 13:], middle)
    torch.testing.assert_close(torch.cat([first, last], 1), expected, atol=tolerance, rtol=tolerance)
    assert states.difference(state, end) < 10 * tolerance


def test_what_cannot_be_packed_stays():
    model = kinformer.build("gpt", recipe="tiny").double()
    assert pack(model) is model
