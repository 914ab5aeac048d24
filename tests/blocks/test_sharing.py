"""Parts that all layers have in common: one module, owned by the model, wherever it is saved, copied or compiled."""

import copy

import pytest
import torch

import kinformer
from kinformer.parts.relative_positions import T5, TransformerXL

TOKENS = torch.randint(23, (2, 12), generator=torch.Generator().manual_seed(0))
SHARING = {
    "t5": {},
    "gpt": {"position": "none", "layers.*.mixer.position": TransformerXL.Config()},
}
each_member = pytest.mark.parametrize("member", SHARING)


def build(member, changes=None):
    torch.manual_seed(0)
    return kinformer.build(member, recipe="tiny", vocab_size=23, set=SHARING[member] | (changes or {})).double()


def shared_part(model, layer):
    position = model.stack.layers[layer].mixer.position
    return position.biases if isinstance(position, TransformerXL) else position


@each_member
def test_layers_use_one_part_that_the_model_owns(member):
    model = build(member)
    assert shared_part(model, 0) is shared_part(model, 1) is model.stack.shared[0]
    names = [name for name in model.state_dict() if "shared" in name or "table" in name or "biases" in name]
    assert names and all(name.startswith("stack.shared.0.") for name in names)
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    own = set(model.stack.shared.parameters())
    assert own and own.isdisjoint(model.stack.layers.parameters())
    model(TOKENS)[0].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in own)


@each_member
def test_sharing_is_tying(member):
    """The shared part has the outputs of equal parts of its own in every layer, and the sum of their gradients."""
    model = build(member)
    key = "position.shared" if member == "t5" else "position.share_biases"
    apart = build(member, {f"layers.*.mixer.{key}": False})
    assert len(apart.stack.shared) == 0
    with torch.no_grad():
        for layer in (0, 1):
            shared_part(apart, layer).load_state_dict(model.stack.shared[0].state_dict())
        weights = {name: value for name, value in model.state_dict().items() if not name.startswith("stack.shared")}
        assert not apart.load_state_dict(weights, strict=False).unexpected_keys
    want, got = apart(TOKENS)[0], model(TOKENS)[0]
    assert torch.equal(want, got)
    (want.square().sum() + got.square().sum()).backward()
    for name, parameter in model.stack.shared[0].named_parameters():
        parts = [shared_part(apart, layer).get_parameter(name).grad for layer in (0, 1)]
        assert (parameter.grad - sum(parts)).abs().max() < 1e-12
        assert (parts[0] - parts[1]).abs().max() > 1e-9


@each_member
def test_a_copy_shares_its_own_part(member):
    model = build(member)
    twin = copy.deepcopy(model)
    assert shared_part(twin, 0) is shared_part(twin, 1) is twin.stack.shared[0] is not model.stack.shared[0]
    with torch.no_grad():
        before = model(TOKENS)[0]
        for parameter in twin.stack.shared.parameters():
            parameter.add_(torch.randn_like(parameter))
        assert torch.equal(model(TOKENS)[0], before)
        moved = twin(TOKENS)[0]
        assert (moved - before).abs().max() > 1e-4
        model.load_state_dict(twin.state_dict())
        assert torch.equal(model(TOKENS)[0], moved)
        assert (
            shared_part(twin.float(), 1).get_parameter(next(iter(twin.stack.shared[0].state_dict()))).dtype
            == torch.float32
        )


@each_member
def test_a_shared_part_compiles(member):
    torch.compiler.reset()
    model = build(member)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (model, compiled):
        run(TOKENS)[0].square().sum().backward()
    gradients = [parameter.grad.clone() / 2 for parameter in model.stack.shared.parameters()]
    model.zero_grad()
    model(TOKENS)[0].square().sum().backward()
    for parameter, gradient in zip(model.stack.shared.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    assert torch.allclose(compiled(TOKENS)[0], model(TOKENS)[0], rtol=0, atol=1e-12)


def test_unlike_configs_are_apart():
    wide = T5.Config(num_buckets=16)
    model = build("t5", {"layers": 4, "layers.1.mixer.position": wide, "layers.3.mixer.position": wide})
    parts = [shared_part(model, layer) for layer in range(4)]
    assert parts[0] is parts[2] and parts[1] is parts[3] and parts[0] is not parts[1]
    assert sorted(len(part.table) for part in model.stack.shared) == [16, 32]
    assert len(build("t5", {"layers.0.mixer.num_heads": 4}).stack.shared) == 2
