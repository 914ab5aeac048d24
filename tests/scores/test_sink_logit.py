"""Sink logits: by their formula, in every way through the door, as gpt-oss has them, and where they vanish."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.core.pattern import Band
from kinformer.kernels.attention import AttentionDropout, Projected, Scoring, Visibility, attention
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.cross import CrossAttention
from kinformer.mixers.memory import SegmentMemory
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Dilated, Local
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import Grouped, MultiHead
from kinformer.parts.relative_positions import Alibi
from kinformer.parts.scores import Additive, Capped, DynamicSpan, ScaledDot, SinkLogit
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, ENCODER_CHECKS, EncoderMixerSubject, MixerSubject

DIM, HEADS, TIME = 16, 4, 11
SINK = SinkLogit.Config()


def built(config, logit=None, seed=0):
    torch.manual_seed(seed)
    mixer = config.build(DIM).double()
    if logit is not None:
        with torch.no_grad():
            mixer.score.logit.copy_(logit)
    return mixer


def numbers(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs(mixer, x):
    if isinstance(mixer, BidirectionalAttention):
        return mixer(x, SequenceContext())
    given = {"source": numbers(len(x), 5, DIM, seed=3)} if isinstance(mixer, CrossAttention) else {}
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64, **given))[0]


VISIBILITY = {
    "causal": (Band(), TIME),
    "window": (Band(behind=3), TIME),
    "one query": (Band(), 1),
    "one query of a window": (Band(behind=3), 1),
    "one query of a pattern": (Dilated.Config(window=4, dilation=2).build(), 1),
    "pattern": (Dilated.Config(window=4, dilation=2).build(), TIME),
    "blind": (Band(behind=9, ahead=-4), TIME),
    "set": (None, TIME),
    "many queries": (None, 30),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("impl", ["auto", "chunked", "sdpa", "flex"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", VISIBILITY)
def test_every_way_through_the_door_is_the_reference(name, ragged, impl):
    """Outputs, log-sum-exps and gradients, with rows of unlike length too, and keys that are padding."""
    pattern, time = VISIBILITY[name]
    if (impl == "flex" and (pattern is None or ragged)) or (impl == "sdpa" and pattern and pattern.band is None):
        pytest.skip("refused elsewhere")
    visibility = Visibility(pattern)
    if ragged and pattern is not None:
        visibility = Visibility(pattern, torch.tensor([[3], [TIME - 1]]) - torch.arange(time - 1, -1, -1))
    elif ragged:
        visibility = Visibility(key_padding_mask=torch.arange(TIME) > torch.tensor([[4], [TIME]]))
    points = [numbers(2, HEADS, time, 16), numbers(2, 2, TIME, 16, seed=2), numbers(2, 2, TIME, 16, seed=3)]
    points = [*points, numbers(HEADS, seed=4)]
    results = []
    for way, lse in ((impl, False), ("reference", False), ("auto", True), ("reference", True)):
        q, k, v, sink = leaves = [point.clone().requires_grad_(impl != "flex") for point in points]
        result = attention(q, k, v, visibility, Scoring(0.6, sink=sink), impl=way, lse=lse)
        parts = [result.out] if result.lse is None else [result.out, result.lse]
        if impl != "flex":
            parts += torch.autograd.grad(sum((part * part.detach().cos()).sum() for part in parts), leaves)
        results.append(parts)
    for one, two in (results[:2], results[2:]):
        for got, want in zip(one, two, strict=True):
            assert (got - want).abs().max() < 1e-9


def test_dropout_and_keys_that_are_not_made():
    q, sink = numbers(2, HEADS, 3, 4), numbers(HEADS)
    dropout = AttentionDropout(0.4, 3)
    x, weight = numbers(2, TIME, 9), numbers(HEADS * 4, 9)
    for scoring in (Scoring(0.6, sink=sink), Scoring(0.6, sink=sink, dropout=dropout)):
        request = Projected(x, weight), Projected(x, weight), Visibility(), scoring
        got, want = (attention(q, *request, impl=impl).out for impl in ("auto", "reference"))
        assert (got - want).abs().max() < 1e-12
    k = numbers(2, HEADS, TIME, 4)
    request = k, k, Visibility(Band()), Scoring(0.6, sink=sink, dropout=dropout)
    got, want = (attention(q, *request, impl=impl).out for impl in ("auto", "reference"))
    assert (got - want).abs().max() < 1e-12
    with pytest.raises(KinformerError, match=r"sink is \[3\], expected one for every query head"):
        attention(q, k, k, Visibility(Band()), Scoring(0.6, sink=sink[:3]))


GROUPED, CAPPED = Grouped.Config(num_kv_heads=2), SinkLogit.Config(inner=Capped.Config(cap=2.0))
CASES = {
    "causal": SoftmaxAttention.Config(score=SINK),
    "window": SoftmaxAttention.Config(score=SINK, pattern=Local.Config(window=3), projection=GROUPED),
    "capped, biased": SoftmaxAttention.Config(score=CAPPED, position=Alibi.Config()),
    "spans": SoftmaxAttention.Config(score=SINK, span=DynamicSpan.Config(max_span=8, ramp=2, initial=0.5, multiple=4)),
    "memory": SegmentMemory.Config(score=SINK, segment=4, memory=6),
    "both ways": BidirectionalAttention.Config(score=SinkLogit.Config(inner=Additive.Config())),
    "source": CrossAttention.Config(score=SINK),
}


@pytest.mark.parametrize("name", ["window", "spans", "memory"])
def test_contract(name):
    make = lambda impl: lambda: built(CASES[name].replace(impl=impl), numbers(HEADS))  # noqa: E731
    impls = {impl: make(impl) for impl in ("reference", "chunked")}
    subject = MixerSubject(make("auto"), dim=DIM, batch=2, impls=impls)
    checks = ["partition", "padding", "reset", "reserved", "implementations"]
    for check in checks + ["gradcheck", "derivatives", "compile"] * (name == "window"):
        CHECKS[check](subject)


def test_contract_of_encoders():
    """With global tokens and a global input, whose keys are merged with the pattern's."""
    config = BidirectionalAttention.Config(score=SINK, pattern=Local.Config(window=2))
    make = lambda impl: lambda: built(config.replace(impl=impl), numbers(HEADS))  # noqa: E731
    subject = EncoderMixerSubject(make("auto"), dim=DIM, impls={"reference": make("reference")})
    for check in ("rows", "padding", "implementations"):
        ENCODER_CHECKS[check](subject)


def test_a_sink_counts_once_where_parts_are_merged():
    """A token that is global anyway changes nothing where all see all; nor does the cut of a segment memory."""
    mixer, x = built(BidirectionalAttention.Config(score=SINK), numbers(HEADS)), numbers(2, TIME, DIM)
    marked = SequenceContext(global_positions=torch.tensor([[0, 4], [2, -1]]))
    assert (mixer(x, marked) - mixer(x, SequenceContext())).abs().max() < 1e-12
    before = SequenceContext(num_global=3)
    assert (mixer(x, before) - mixer(x, SequenceContext())).abs().max() < 1e-12
    memory = built(
        SegmentMemory.Config(score=SINK, position=NoPosition.Config(), segment=4, memory=TIME), numbers(HEADS)
    )
    softmax = built(SoftmaxAttention.Config(score=SINK, projection=MultiHead.Config(bias=False), bias=False))
    softmax.load_state_dict(memory.state_dict())
    assert (outputs(memory, x) - outputs(softmax, x)).abs().max() < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_far_below_all_scores_it_is_the_inner_score_and_at_0_it_is_not(name):
    config, x = CASES[name], numbers(2, TIME, DIM)
    plain = built(config.replace(score=config.score.inner))
    weights = {key.replace("score.", "score.inner."): value for key, value in plain.state_dict().items()}
    off = [built(config, torch.full((HEADS,), at)) for at in (-1e3, 0.0)]
    for mixer in off:
        mixer.load_state_dict(weights, strict=False)
    none, zero = (outputs(mixer, x) for mixer in off)
    assert (none - outputs(plain, x)).abs().max() < 1e-12
    assert (zero - none).abs().max() > 1e-3
    fixed = built(config.replace(score=config.score.replace(learned=False)))
    fixed.load_state_dict(weights, strict=False)
    assert torch.equal(outputs(fixed, x), zero) and "score.logit" not in dict(fixed.named_parameters())


def test_parity_with_gpt_oss():
    """Hugging Face's attention: the sink stands as one more column of the scores and is dropped behind the softmax."""

    class Module(torch.nn.Module):
        num_key_value_groups = 2

    mixer = built(SoftmaxAttention.Config(score=SINK, projection=Grouped.Config(num_kv_heads=2)), numbers(HEADS))
    theirs, x = Module().eval(), numbers(2, TIME, DIM)
    theirs.sinks = mixer.score.logit
    q, k, v = mixer.projection(x)
    mask = torch.full((TIME, TIME), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = eager_attention_forward(theirs, q, k, v, mask, scaling=(DIM // HEADS) ** -0.5)
    want = mixer.out(want.flatten(2))
    for impl in ("auto", "chunked", "sdpa", "reference"):
        mixer.impl = impl
        assert (outputs(mixer, x) - want).abs().max() < 1e-12
    assert GptOssConfig.model_type == "gpt_oss"
    leaf = mixer.score.logit
    mixer.impl = "auto"
    got, want = (torch.autograd.grad(y.square().sum(), leaf)[0] for y in (outputs(mixer, x), want))
    assert (got - want).abs().max() < 1e-12


def test_a_sink_stands_around_another_score_once():
    with pytest.raises(KinformerError, match="stands around another"):
        SoftmaxAttention.Config(score=SinkLogit.Config(inner=SINK)).build(DIM)
    assert ScaledDot.Config().build(HEADS, 4).sink() is None
