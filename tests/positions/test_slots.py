"""A position acts in the slot that it is given to, or is refused there with the right path."""

import pytest
import torch

import kinformer
from kinformer.family.kinds import kinds
from kinformer.runtime.errors import KinformerError

POSITIONS = sorted(set(kinds()["position"].builtin) - {"none"})
MEMBERS = {"gpt": "layers.*.mixer.position", "bert": "layers.*.mixer.position"}


def logits(member, changes):
    torch.manual_seed(0)
    model = kinformer.build(member, recipe="tiny", vocab_size=64, set={"position": "none"} | changes).double().eval()
    with torch.no_grad():
        for parameter in model.position.parameters():
            parameter.add_(0.1)
        for unit in model.stack.units:
            for parameter in (*unit.mixer.position.parameters(), *unit.mixer.projection.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for parameter in model.stack.shared.parameters():
            parameter.add_(torch.randn_like(parameter))
        out = model(torch.arange(40).expand(1, -1))
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("kind", POSITIONS)
def test_each_acts_in_one_slot_and_is_refused_in_the_other(member, kind):
    acts = []
    for path, right in (("position", "layers.*.mixer.position"), (MEMBERS[member], "the model's position")):
        without = logits(member, {})
        try:
            given = logits(member, {path: kind})
        except KinformerError as error:
            assert f"the position {kind!r}" in str(error) and right in str(error)
            continue
        assert given.shape == without.shape and (given - without).abs().max() > 1e-6, f"{path}={kind} does nothing"
        acts.append(path)
    assert len(acts) == 1
