"""Multi-head latent attention: DeepSeek-V3's module, both forms, its limits, its contract, and what it refuses."""

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from kinformer.core.contract import Chunk
from kinformer.generation.weights import PackedLinear, pack
from kinformer.mixers.latent import LatentAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Local, Sinks
from kinformer.parts.positions import NoPosition
from kinformer.parts.relative_positions import Alibi, Rope, Shaw, TransformerXL
from kinformer.parts.scores import Additive, Capped, SinkLogit
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

TIME = 13


def config(**changes):
    return LatentAttention.Config(
        **{"num_heads": 2, "head_dim": 6, "value_dim": 5, "rotary_dim": 4, "latent_dim": 7} | changes
    )


def outputs(mixer, x, **masks):
    return mixer(Chunk(x, **masks), mixer.initial_state(len(x), dtype=torch.float64))[0]


@pytest.mark.parametrize("rank", [None, 9])
def test_parity_with_deepseek_v3(rank):
    settings = DeepseekV3Config(
        hidden_size=DIM, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=rank, kv_lora_rank=7,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = DeepseekV3Attention(settings, 0).double().eval()
    mixer = built(config(query_latent_dim=rank))
    pairs = [
        (mixer.query, theirs.q_proj if rank is None else theirs.q_b_proj),
        (mixer.down, theirs.kv_a_proj_with_mqa), (mixer.norm, theirs.kv_a_layernorm),
        (mixer.up, theirs.kv_b_proj), (mixer.out, theirs.o_proj),
    ]  # fmt: skip
    if rank is not None:
        pairs += [(mixer.query_down, theirs.q_a_proj), (mixer.query_norm, theirs.q_a_layernorm)]
    with torch.no_grad():
        for ours, other in pairs:
            ours.weight.copy_(other.weight)
    x, rotary = inputs(TIME), DeepseekV3RotaryEmbedding(settings)
    mask = torch.full((TIME, TIME), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = theirs(x, rotary(x, torch.arange(TIME)[None]), mask)
    for mixer.form in ("expanded", "absorbed"):
        for mixer.impl in ("auto", "reference"):
            assert (outputs(mixer, x) - want).abs().max() < 1e-6  # their angles are float32
    assert want.abs().max() > 1e-2


def test_parity_with_the_full_layers_of_kimi_linear():
    """Without positions, of keys that share features."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    settings = kimi.KimiLinearConfig(
        hidden_size=DIM, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=7, qk_nope_head_dim=6,
        qk_rope_head_dim=4, v_head_dim=5, num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = kimi.KimiLinearAttention(settings, 0).double().eval()
    mixer = built(config(position=NoPosition.Config()))
    pairs = [
        (mixer.query, theirs.q_proj), (mixer.down, theirs.kv_a_proj_with_mqa), (mixer.norm, theirs.kv_a_layernorm),
        (mixer.up, theirs.kv_b_proj), (mixer.out, theirs.o_proj),
    ]  # fmt: skip
    with torch.no_grad():
        for ours, other in pairs:
            ours.weight.copy_(other.weight)
    x = inputs(TIME)
    mask = torch.full((TIME, TIME), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = theirs(x, mask)
    for mixer.form in ("expanded", "absorbed"):
        assert (outputs(mixer, x) - want).abs().max() < 1e-6
    assert want.abs().max() > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pattern": Local.Config(window=4), "query_latent_dim": 5, "gate": "head"},
        {"position": Alibi.Config(), "score": SinkLogit.Config()},
        {"position": NoPosition.Config(), "rotary_dim": 0, "score": Capped.Config()},
        {"dropout": 0.3},
    ],
)
def test_absorbed_is_expanded_with_gradients_and_after_a_past(changes):
    mixer = built(config(**changes))
    x = inputs(TIME).requires_grad_()
    results = []
    for mixer.form in ("expanded", "absorbed"):
        torch.manual_seed(5)
        mixer.train("dropout" in changes)
        first, state = mixer(Chunk(x[:, :5]), mixer.initial_state(len(x), dtype=x.dtype))
        second, state = mixer(Chunk(x[:, 5:]), state)
        y = torch.cat([first, second], 1)
        grads = torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])
        results.append([y, *state, *grads])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 1e-10 * max(1, float(other.detach().abs().max()))


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_it_is_softmax_attention_where_latents_are_the_stream_itself(form):
    """A latent as wide as x, of unit root mean square, loses nothing: keys and values of every head are products
    of x. One token's latent that is scaled breaks the limit."""
    mixer = built(config(value_dim=6, rotary_dim=0, latent_dim=DIM, position=NoPosition.Config(), eps=1e-12, form=form))
    softmax = built(SoftmaxAttention.Config(num_heads=2, head_dim=6, bias=False))
    with torch.no_grad():
        mixer.down.weight.copy_(torch.eye(DIM))
        mixer.norm.weight.fill_(1.0)
        q, k, v = softmax.projection.qkv.weight.unflatten(0, (3, 2, 6))
        softmax.projection.qkv.bias.zero_()
        mixer.query.weight.copy_(q.flatten(0, 1))
        mixer.up.weight.copy_(torch.cat([k, v], 1).flatten(0, 1))
        mixer.out.weight.copy_(softmax.out.weight)
    x = inputs(TIME)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    assert (outputs(mixer, x) - outputs(softmax, x)).abs().max() < 1e-10
    x[:, 3] *= 2
    assert (outputs(mixer, x) - outputs(softmax, x)).abs().max() > 1e-3


def test_the_cheaper_form_is_taken():
    mixer = built(config(head_dim=4, value_dim=4, latent_dim=16, rotary_dim=2))
    assert [mixer._absorbs(time) for time in (1, 5, 6, 100)] == [True, True, False, False]
    assert built(config(head_dim=8, value_dim=8, latent_dim=8))._absorbs(100)  # a latent no wider than a key


def test_the_state_is_the_latent_and_the_rotary_key():
    mixer = built(config())
    _, state = mixer(Chunk(inputs(TIME)), mixer.initial_state(2, dtype=torch.float64))
    assert state.memory.shape == (2, 1, TIME, 7 + 4)
    assert mixer.state_bytes(TIME, dtype=torch.float64) == TIME * 11 * 8 + 8


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize(
    "changes", [{"form": "absorbed"}, {"form": "expanded", "query_latent_dim": 5}, {"pattern": Local.Config(window=4)}]
)
def test_the_contract(changes, check):
    one = config(**changes)
    other = "absorbed" if one.form == "expanded" else "expanded"
    impls = {
        "reference": one.replace(impl="reference"),
        "sdpa": one.replace(impl="sdpa"),
        other: one.replace(form=other),
    }
    subject = MixerSubject(
        lambda: one.build(DIM), dim=DIM, impls={name: lambda c=c: c.build(DIM) for name, c in impls.items()}
    )
    CHECKS[check](subject)


def test_it_compiles():
    CHECKS["compile"](MixerSubject(lambda: config().build(DIM), dim=DIM))


def test_a_packed_model_keeps_the_matrices_that_queries_absorb():
    mixer = config(form="absorbed").build(DIM)
    packed = pack(mixer)
    assert isinstance(packed.out, PackedLinear)
    assert not isinstance(packed.up, PackedLinear)
    x = inputs(TIME).float()
    with torch.no_grad():
        want, got = (m(Chunk(x), m.initial_state(len(x)))[0] for m in (mixer, packed))
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"position": Shaw.Config(max_distance=3)}, "adds keys or values by distance"),
        ({"position": TransformerXL.Config()}, "adds keys or values by distance"),
        ({"position": Rope.Config(), "rotary_dim": 0}, "rotary_dim = 0 leaves none"),
        ({"score": Additive.Config()}, "not a function of the product"),
        ({"pattern": Sinks.Config(count=1, window=3)}, "keep their first tokens"),
        ({"form": "both"}, "form of the mixer 'latent': 'both' is not one of"),
        ({"latent_dim": 0}, "latent_dim must be 1 or more"),
    ],
)
def test_what_it_refuses(changes, sentence):
    with pytest.raises(KinformerError, match=sentence):
        config(**changes).build(DIM)
