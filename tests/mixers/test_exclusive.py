"""Exclusive self-attention: its formula, its limits, its contract, and why a trace has no weights of it."""

import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.core.probe import NoWeights, weights_of
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Local, Sinks
from kinformer.parts.projections import Grouped
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

TIME, HEADS = 11, 4


def outputs(mixer, x, **masks):
    return mixer(Chunk(x, **masks), mixer.initial_state(len(x), dtype=torch.float64))[0]


@pytest.mark.parametrize("pattern", [Local.Config(window=4), Sinks.Config(count=1, window=3)])
def test_contract(pattern):
    config = SoftmaxAttention.Config(
        exclusive=True, pattern=pattern, projection=Grouped.Config(num_kv_heads=2), differential=None
    )
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2)
    for check in ("partition", "causality", "padding", "reset", "rows", "reserved", "gradcheck"):
        CHECKS[check](subject)


def test_it_is_the_formula_and_nothing_where_its_strength_is_0():
    plain, mixer = (
        built(SoftmaxAttention.Config(exclusive=on, projection=Grouped.Config(num_kv_heads=2), bias=False))
        for on in (False, True)
    )
    mixer.load_state_dict(plain.state_dict(), strict=False)
    x, heads = inputs(TIME), []
    plain.out.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    want = outputs(plain, x)
    with torch.no_grad():
        mixer.exclusive.strength.zero_()
        assert (outputs(mixer, x) - want).abs().max() < 1e-12
        mixer.exclusive.strength.copy_(torch.linspace(-1, 2, HEADS))
        y = heads[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v = plain.projection(x)[2].repeat_interleave(2, 1)
        u = v / v.norm(dim=-1, keepdim=True)
        strength = torch.linspace(-1, 2, HEADS).double().tanh()[:, None, None]
        y = y - strength * (y * u).sum(-1, keepdim=True) * u
        got = outputs(mixer, x)
    assert (got - plain.out(y.transpose(1, 2).flatten(2))).abs().max() < 1e-12
    assert (got - want).abs().max() > 1e-3


def test_at_full_strength_an_output_is_orthogonal_to_its_tokens_value():
    mixer, x, heads = built(SoftmaxAttention.Config(exclusive=True)), inputs(TIME), []
    mixer.out.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    with torch.no_grad():
        mixer.exclusive.strength.fill_(50.0)
        outputs(mixer, x)
    y, v = heads[0].unflatten(-1, (HEADS, -1)).transpose(1, 2), mixer.projection(x)[2]
    assert (y * v).sum(-1).abs().max() < 1e-12
    assert not y[:, :, 0].abs().max() > 1e-12  # the first token sees its own value alone


def test_a_trace_says_that_no_weights_make_up_its_outputs():
    mixer = SoftmaxAttention.Config(exclusive=True).build(DIM)
    with pytest.raises(NoWeights, match="own value"):
        weights_of(mixer, (Chunk(torch.randn(1, 5, DIM)), mixer.initial_state(1)))
