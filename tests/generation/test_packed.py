"""Packed weights change speed, not meaning."""

import pytest
import torch

import kinformer
from kinformer.core.parts import UnpackedLinear
from kinformer.core.state import difference
from kinformer.generation.generate import evaluating
from kinformer.generation.native import is_native
from kinformer.generation.weights import PackedLinear, can_pack, inference_copy, pack
from tests.members import CAUSAL, TINY, one_layer

native = pytest.mark.skipif(not is_native(), reason="no C compiler is installed")


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_the_same_logits_and_state(name, dtype, tolerance):
    torch.manual_seed(0)
    model = one_layer(TINY[name]).build().eval().to(dtype)
    if not can_pack(model):
        pytest.skip("this machine or build of PyTorch has no packed products")
    packed = pack(model)
    products = sum(
        isinstance(module, torch.nn.Linear) and not isinstance(module, UnpackedLinear) for module in model.modules()
    )
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == products > 0
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    tokens = torch.randint(256, (3, 20))
    with torch.no_grad():
        expected, state = model(tokens)
        first, middle = packed(tokens[:, :13])
        last, end = packed(tokens[:, 13:], middle)
    torch.testing.assert_close(torch.cat([first, last], 1), expected, atol=tolerance, rtol=tolerance)
    assert difference(state, end) < 10 * tolerance


def test_what_cannot_be_packed_stays():
    model = kinformer.build("gpt", recipe="tiny").double()
    assert pack(model) is model


@native
def test_generate_packs_once_and_again_after_a_change() -> None:
    torch.manual_seed(0)
    model = kinformer.build("gpt", recipe="tiny").eval()
    prompt = torch.randint(256, (1, 5))
    expected = kinformer.generate(model, prompt, max_new_tokens=20, temperature=0)
    assert not model._inference_copies  # too few to pay
    assert torch.equal(kinformer.generate(model, prompt, max_new_tokens=60, temperature=0)[:, :20], expected)
    ours = inference_copy(model, 60)
    assert ours is not model and ours is inference_copy(model, 20)
    wide = model.stack.layers[0].mixer.projection.qkv.weight
    assert isinstance(ours.stack.layers[0].mixer.projection.qkv, PackedLinear)
    norms = [each.stack.layers[0].mixer_residual.norm.weight for each in (model, ours)]
    assert norms[0].data_ptr() == norms[1].data_ptr() and norms[0].requires_grad and not norms[1].requires_grad
    with torch.no_grad():
        wide.mul_(2)
    assert inference_copy(model, 60) is not ours


@native
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_an_optimiser_is_a_change(fused: bool) -> None:
    torch.manual_seed(0)
    model = kinformer.build("gpt", recipe="tiny").eval()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    ours = inference_copy(model, 60)
    model(torch.randint(256, (1, 5)))[0].square().sum().backward()
    optimiser.step()
    assert ours is not model and inference_copy(model, 60) is not ours


@native
def test_a_model_with_hooks_is_not_copied() -> None:
    model = kinformer.build("gpt", recipe="tiny").eval()
    handle = model.stack.layers[0].register_forward_hook(lambda *_: None)
    assert inference_copy(model, 60) is model
    handle.remove()
    assert inference_copy(model, 60) is not model


def test_every_module_returns_to_its_mode() -> None:
    model = kinformer.build("gpt", recipe="tiny").train()
    model.stack.layers[0].eval()
    modes = [module.training for module in model.modules()]
    kinformer.generate(model, torch.randint(256, (1, 5)), max_new_tokens=2)
    assert [module.training for module in model.modules()] == modes and True in modes and False in modes
    with evaluating(model):  # one thread ends after another has begun
        other = evaluating(model)
        other.__enter__()
    assert not any(module.training for module in model.modules())
    other.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == modes
