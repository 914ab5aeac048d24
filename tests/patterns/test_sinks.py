"""A window beside pinned first tokens: its definition written out, its contract, its limits, and endless text."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import difference
from kinformer.generation.session import Session
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.nn import attention as plain_attention
from kinformer.parts.patterns.sequence import Local, Sinks
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import Convolved, Grouped
from kinformer.parts.relative_positions import T5, Alibi, Rope
from kinformer.parts.scores import SinkLogit, SoftSpan
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject
from tests.mixers.made import DIM, built, inputs

COUNT, WINDOW, TIME = 3, 5, 21
SINKS = Sinks.Config(count=COUNT, window=WINDOW)
POSITIONS = {
    "none": NoPosition.Config(),
    "rope": Rope.Config(),
    "alibi": Alibi.Config(),
    "t5": T5.Config(num_buckets=8),
}


def outputs(mixer, x, *cuts, reset=None):
    state, parts = mixer.initial_state(len(x), dtype=torch.float64), []
    resets = [None] * (len(cuts) + 1) if reset is None else reset.tensor_split(cuts, 1)
    for part, marks in zip(x.tensor_split(cuts, 1), resets, strict=True):
        y, state = mixer(Chunk(part, reset=marks), state)
        parts.append(y)
    return torch.cat(parts, 1), state


def by_ranks(mixer, x):
    """The definition: each token attends to its cache of ``COUNT`` + ``WINDOW`` tokens, whose positions are ranks."""
    out = []
    for t in range(x.shape[1]):
        cached = [j for j in range(t + 1) if j < COUNT or j > t - WINDOW]
        ranks = torch.arange(len(cached)).expand(len(x), -1)
        q, k, v = mixer.projection(x[:, cached])
        q, k = mixer.position.rotate(q, k, ranks)
        relative = mixer.position.relative(0, len(cached) - 1)
        scoring = Scoring.of(mixer.score, relative)
        q = mixer.score.queries(q[:, :, -1:])
        visible = Visibility(Local.Config(window=len(cached)).build(), ranks[:, -1:])
        y = attention(q, k, mixer.position.values(v), visible, scoring, impl="reference").out
        out.append(mixer.out(y.transpose(1, 2).flatten(2)))
    return torch.cat(out, 1)


@pytest.mark.parametrize("score", [None, SinkLogit.Config()])
@pytest.mark.parametrize("position", POSITIONS)
def test_positions_are_ranks_in_the_cache(position, score):
    changes = {} if score is None else {"score": score}
    config = SoftmaxAttention.Config(pattern=SINKS, position=POSITIONS[position], **changes)
    mixer, x = built(config.replace(projection=Grouped.Config(num_kv_heads=2))), inputs(TIME)
    want = by_ranks(mixer, x)
    for cuts in ((), (2,), (7, 8), tuple(range(1, TIME))):
        got, state = outputs(mixer, x, *cuts)
        assert (got - want).abs().max() < 1e-12
    assert state.attention.k.shape[2] == WINDOW - 1 and state.first_keys.shape[2] == COUNT


def test_a_reset_begins_with_first_tokens_of_its_own():
    mixer, x = built(SoftmaxAttention.Config(pattern=SINKS, position=Alibi.Config())), inputs(TIME)
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 9] = reset[1, 2] = reset[1, 14] = True
    whole, last = outputs(mixer, x, reset=reset)
    alone = [by_ranks(mixer, part) for part in (x[:1, :9], x[:1, 9:], x[1:, :2], x[1:, 2:14], x[1:, 14:])]
    want = torch.cat([torch.cat(alone[:2], 1), torch.cat(alone[2:], 1)])
    assert (whole - want).abs().max() < 1e-12
    cut, end = outputs(mixer, x, 1, 4, 12, 13, reset=reset)
    assert (cut - want).abs().max() < 1e-12 and difference(last, end) < 1e-12


CONFIGS = {
    "rope": {"position": Rope.Config(), "projection": Grouped.Config(num_kv_heads=2)},
    "convolved, biased": {"position": Alibi.Config(), "projection": Convolved.Config(width=3)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_contract(name):
    config = SoftmaxAttention.Config(pattern=SINKS, **CONFIGS[name])
    impls = {impl: lambda impl=impl: config.replace(impl=impl).build(DIM) for impl in ("reference", "chunked")}
    subject = MixerSubject(lambda: config.build(DIM), dim=DIM, batch=3, time=TIME, impls=impls)
    left_out = ("compile", "derivatives") if name != "rope" else ()
    for check in (check for check in CHECKS if check not in left_out):
        CHECKS[check](subject)


def test_a_text_within_the_window_is_attended_to_in_full_and_a_longer_one_is_not():
    config = SoftmaxAttention.Config(position=Rope.Config())
    full, x = built(config), inputs(TIME)
    mixers = [built(config.replace(pattern=SINKS.replace(window=window))) for window in (TIME, TIME - COUNT - 1)]
    for mixer in mixers:
        mixer.load_state_dict(full.state_dict())
    gaps = [(outputs(mixer, x)[0] - outputs(full, x)[0]).abs().max() for mixer in mixers]
    assert gaps[0] < 1e-12 and gaps[1] > 1e-4


def test_refused_where_nothing_is_cached():
    with pytest.raises(KinformerError, match="is for decoders"):
        BidirectionalAttention.Config(pattern=SINKS).build(DIM)
    with pytest.raises(KinformerError, match="is for decoders"):
        SoftmaxAttention.Config(pattern=SINKS, span=SoftSpan.Config(max_span=8, ramp=2)).build(DIM)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(KinformerError, match="is for decoders"):
        plain_attention(q, q, q, pattern="sinks")
    with pytest.raises(KinformerError, match="log-sum-exps"):
        SoftmaxAttention.Config(pattern=SINKS, impl="sdpa").build(DIM)
    with pytest.raises(KinformerError, match="without, use 'local'"):
        Sinks.Config(count=0)


def test_steps_of_a_session_are_recorded_beyond_the_window():
    """Where the window slides, one token at a time gives what the text gives as a whole."""
    torch.manual_seed(0)
    model = kinformer.build(
        "rope", recipe="tiny", set={"layers.*.mixer.pattern": {"kind": "sinks", "window": 16}}
    ).eval()
    sessions = [Session(model, 2, temperature=0, room=12, recorded=recorded) for recorded in (True, False)]
    prompt = torch.randint(model.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    for session in sessions:
        session._stepping.record_at = 2
        session.feed(prompt)
    drawn = [torch.stack([session.step() for _ in range(40)], 1) for session in sessions]
    assert torch.equal(*drawn) and sessions[0]._stepping.running is not None
    with torch.no_grad():
        whole = model(torch.cat([prompt, drawn[0]], 1))[0]
    assert (whole[:, -1] - sessions[1]._logits).abs().max() < 1e-4
