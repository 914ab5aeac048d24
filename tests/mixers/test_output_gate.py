"""The gate of the heads' outputs: its limits, its contract, Qwen3-Next's attention, and weights that a trace reads."""

import pytest
import torch
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.core.probe import weights_of
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Local
from kinformer.parts.projections import Grouped, Normalised
from kinformer.parts.relative_positions import Rope
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, ENCODER_CHECKS, EncoderMixerSubject, MixerSubject

from .made import DIM, built, inputs

HEADS, TIME = 4, 11


def outputs(mixer, x):
    if isinstance(mixer, BidirectionalAttention):
        return mixer(x, SequenceContext())
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))[0]


@pytest.mark.parametrize("gate", ["head", "element"])
def test_contract(gate):
    config = SoftmaxAttention.Config(gate=gate, pattern=Local.Config(window=4))
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2)
    for check in ("partition", "causality", "padding", "reset", "rows", "gradcheck", "compile"):
        CHECKS[check](subject)
    both_ways = EncoderMixerSubject(lambda: BidirectionalAttention.Config(gate=gate).build(DIM), dim=DIM)
    for check in ("rows", "padding"):
        ENCODER_CHECKS[check](both_ways)


@pytest.mark.parametrize("mixer", [SoftmaxAttention, BidirectionalAttention])
@pytest.mark.parametrize("gate", ["head", "element"])
def test_a_gate_of_weight_0_halves_the_outputs_and_any_other_weight_does_not(mixer, gate):
    """The sigmoid of 0 is 1 / 2; the gate of a head is that of all its features."""
    plain, x = built(mixer.Config(bias=False)), inputs(TIME)
    gated = built(mixer.Config(bias=False, gate=gate))
    gated.load_state_dict(plain.state_dict(), strict=False)
    got = outputs(gated, x)
    with torch.no_grad():
        gated.gate.linear.weight.zero_()
    assert (2 * outputs(gated, x) - outputs(plain, x)).abs().max() < 1e-12
    assert (got - outputs(gated, x)).abs().max() > 1e-4
    assert len(gated.gate.linear.weight) == {"head": HEADS, "element": DIM}[gate]


def test_only_requested_outputs_are_gated_alike():
    mixer, x = built(SoftmaxAttention.Config(gate="element")), inputs(TIME)
    mask = torch.arange(TIME).expand(2, -1) % 3 == 1
    got, _ = mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64), mask)
    assert (got[mask] - outputs(mixer, x)[mask]).abs().max() < 1e-12 and not got[~mask].any()


def test_parity_with_qwen3_next():
    """Hugging Face's module: its rows of queries hold, head by head, those of the gate behind them."""
    theirs_config = Qwen3NextConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=8, partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen3NextAttention(theirs_config, 0).double().eval()
    config = SoftmaxAttention.Config(
        num_heads=HEADS, head_dim=8, gate="element", bias=False, position=Rope.Config(fraction=0.5, layout="half"),
        projection=Normalised.Config(inner=Grouped.Config(num_kv_heads=2, bias=False)),
    )  # fmt: skip
    mixer = built(config)
    with torch.no_grad():
        query, gate = theirs.q_proj.weight.view(HEADS, 2, 8, DIM).unbind(1)
        rows = [query.flatten(0, 1), theirs.k_proj.weight, theirs.v_proj.weight]
        mixer.projection.inner.qkv.weight.copy_(torch.cat(rows))
        mixer.gate.linear.weight.copy_(gate.flatten(0, 1))
        mixer.out.weight.copy_(theirs.o_proj.weight)
        for ours, other in ((mixer.projection.q_norm, theirs.q_norm), (mixer.projection.k_norm, theirs.k_norm)):
            other.weight.copy_(torch.linspace(-0.3, 0.5, 8))
            ours.weight.copy_(1 + other.weight)  # theirs is kept less 1
    x = inputs(TIME)
    rotary = Qwen3NextRotaryEmbedding(theirs_config)
    mask = torch.full((TIME, TIME), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = theirs(x, rotary(x, torch.arange(TIME)[None]), mask)
    assert (outputs(mixer, x) - want).abs().max() < 1e-6  # their norms and angles are float32
    assert want.abs().max() > 1e-2


@pytest.mark.parametrize("gate", ["head", "element"])
def test_a_trace_reads_the_probabilities_before_the_gate(gate):
    mixer, x = built(SoftmaxAttention.Config(gate=gate)).eval(), inputs(TIME, batch=1)
    weights = weights_of(mixer, (Chunk(x), mixer.initial_state(1, dtype=torch.float64))).weights
    assert (weights.sum(-1) - 1).abs().max() < 1e-12


def test_an_unknown_gate_is_refused():
    with pytest.raises(KinformerError, match="gate of the mixer 'softmax': 'heads' is not one of"):
        SoftmaxAttention.Config(gate="heads").build(DIM)
