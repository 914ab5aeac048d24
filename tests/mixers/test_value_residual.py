"""Value residuals: by their formula, layer by layer, their limits, and where there is no first layer to read."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MODEL_CHECKS, MixerSubject, ModelSubject

from .made import DIM, built, inputs

VALUES = {"layers.*.mixer.value_residual": True}
VOCAB = 23


def model(member="rope", seed=0, **changes):
    torch.manual_seed(seed)
    return (
        kinformer.build(member, recipe="tiny", vocab_size=VOCAB, set={"layers": 3, **VALUES, **changes}).double().eval()
    )


def tokens(time=19):
    return torch.randint(VOCAB, (2, time), generator=torch.Generator().manual_seed(1))


def mix(net, *values):
    for layer, value in zip(net.stack.layers, values, strict=True):
        with torch.no_grad():
            layer.mixer.value_residual.mix.fill_(value)


def test_each_layer_mixes_its_values_with_those_of_the_first():
    """The layers one by one, values replaced by lam v_l + (1 - lam) v_1 as the paper writes them."""
    net, plain = model(), model(**{"layers.*.mixer.value_residual": False})
    mix(net, 0.9, 0.3, 0.8)
    plain.load_state_dict(net.state_dict(), strict=False)
    values = []

    def mixed(lam):
        def hook(module, _, qkv):
            q, k, v = qkv
            values.append(v)
            return q, k, lam * v + (1 - lam) * values[0]

        return hook

    for layer, lam in zip(plain.stack.layers, (0.9, 0.3, 0.8), strict=True):
        layer.mixer.projection.register_forward_hook(mixed(lam))
    with torch.no_grad():
        want, got = plain(tokens())[0], net(tokens())[0]
    assert (got - want).abs().max() < 1e-12 and len(values) == 3


def test_with_all_weight_on_its_own_values_a_model_is_as_without_and_one_step_off_it_is_not():
    net, plain = model(), model(**{"layers.*.mixer.value_residual": False})
    plain.load_state_dict(net.state_dict(), strict=False)
    with torch.no_grad():
        want = plain(tokens())[0]
        mix(net, 0.2, 1.0, 1.0)  # the first layer's own values are the first
        assert (net(tokens())[0] - want).abs().max() < 1e-12
        mix(net, 1.0, 1.0, 0.9)
        assert (net(tokens())[0] - want).abs().max() > 1e-4


def test_contract():
    subject = ModelSubject(model, VOCAB, batch=2, time=19)
    for check in ("causality", "partition", "padding", "reset"):
        MODEL_CHECKS[check](subject)
    alone = MixerSubject(lambda: SoftmaxAttention.Config(value_residual=True).build(DIM), dim=DIM, batch=2)
    CHECKS["partition"](alone)


def test_an_encoder_mixes_too():
    net = model("bert")
    with torch.no_grad():
        before = net(tokens())
        mix(net, 0.1, 0.1, 0.1)
        after = net(tokens())
    assert (before - after).abs().max() > 1e-4


def gradients(net):
    net.train()
    torch.manual_seed(3)
    net(tokens())[0].square().sum().backward()
    return {name: weight.grad for name, weight in net.named_parameters()}


def test_every_layer_learns_its_share_and_checkpoints_change_no_gradient():
    want, got = gradients(model()), gradients(model(**{"stack.checkpoint": True}))
    for name, gradient in want.items():
        assert (gradient - got[name]).abs().max() < 1e-9, name
    shares = [gradient for name, gradient in want.items() if name.endswith("value_residual.mix")]
    assert [bool(share.abs() > 1e-6) for share in shares] == [False, True, True]


def test_a_layer_alone_is_the_first():
    plain, mixer, x = built(SoftmaxAttention.Config()), built(SoftmaxAttention.Config(value_residual=True)), inputs(7)
    mixer.load_state_dict(plain.state_dict(), strict=False)
    got, want = (one(Chunk(x), one.initial_state(2, dtype=torch.float64))[0] for one in (mixer, plain))
    assert torch.equal(got, want)


def test_refused_where_no_values_are_handed_on_or_they_differ():
    for stack in ("reversible", "universal", "exits"):
        with pytest.raises(KinformerError, match=f"the stack '{stack}' does not hand on"):
            model(stack=stack)
    with pytest.raises(KinformerError, match="1 x 16 and 2 x 16"):
        model(**{"layers.1.mixer.projection": {"kind": "grouped", "num_kv_heads": 1}})
