"""Wrong arguments of mixers and layers: one sentence with the value and what was expected, never PyTorch's."""

import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.encoder import EncoderMixer
from kinformer.runtime.errors import KinformerError
from tests.members import MEMBERS


def modules_of(name):
    """One mixer of each class in a member's tiny model, and one layer of each."""
    model = kinformer.build(name, recipe="tiny").eval()
    found = {}
    for module in model.modules():
        if getattr(module, "dim", 0) and isinstance(module, nn.Module) and hasattr(module, "mixer"):
            found.setdefault(type(module), module)
        if isinstance(module, CausalMixer | EncoderMixer):
            found.setdefault(type(module), module)
    return found.values()


@pytest.mark.parametrize("name", MEMBERS)
def test_wrong_calls_are_one_sentence(name):
    seen = 0
    for module in modules_of(name):
        dim = module.dim
        assert dim, type(module)
        wrong = {
            f"[2, 3, {dim + 1}] but must be [batch, time, dim = {dim}]": torch.zeros(2, 3, dim + 1),
            f"[3, {dim}] but must be [batch, time, dim = {dim}]": torch.zeros(3, dim),
            f"[2, 0, {dim}] but must be [batch, time, dim = {dim}] with batch >= 1 and time >= 1": torch.zeros(
                2, 0, dim
            ),
            f"[0, 3, {dim}] but must be [batch, time, dim = {dim}] with batch >= 1 and time >= 1": torch.zeros(
                0, 3, dim
            ),
        }
        causal = hasattr(module, "initial_state")
        for message, x in wrong.items():
            with pytest.raises(KinformerError) as error:
                module(Chunk(x), ()) if causal else module(x)
            assert message in str(error.value)
        if causal:
            x = torch.zeros(2, 3, dim)
            for arguments, message in (
                ((Chunk(x), None), "the state is None; begin with initial_state"),
                ((x, ()), "of the type Tensor but must be a Chunk"),
                ((Chunk(x, valid=torch.ones(2, 4, dtype=torch.bool)), ()), "valid is torch.bool [2, 4], but must be"),
                ((Chunk(x, reset=torch.ones(2, 3)), ()), "reset is torch.float32 [2, 3], but must be"),
            ):
                with pytest.raises(KinformerError) as error:
                    module(*arguments)
                assert message in str(error.value)
        seen += 1
    assert seen
