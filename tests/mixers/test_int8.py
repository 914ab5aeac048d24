"""Keys and values of the past in 8 bits: their error, what a prompt gives, and sessions that step with them."""

import pytest
import torch

import kinformer
from kinformer.core.attention_state import Quantized, packed, unpacked
from kinformer.core.contract import Chunk
from kinformer.core.pattern import Band
from kinformer.core.state import nbytes, reserve
from kinformer.generation.session import Session
from kinformer.kernels import attention
from kinformer.kernels.attention import cached as int8
from kinformer.kernels.softmax import Scoring, Visibility
from kinformer.lab.estimation.estimate import state_bytes
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.decays import Sigmoid
from kinformer.parts.patterns.sequence import Local
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import multiplies_int8
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

CONFIG = SoftmaxAttention.Config(num_heads=2, cache="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_number_is_off_by_half_a_step_at_most(dtype):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = 0
    x[0, 1] *= 1e4
    held = packed(x)
    assert held.dtype == torch.int8 and held.shape == (3, 5, 19)
    error = (unpacked(held, torch.float64) - x.double()).abs()
    assert (error <= x.double().abs().amax(-1, keepdim=True) / 254 * (1 + 2**-11)).all()
    assert (unpacked(held, dtype)[0, 0] == 0).all()


@pytest.mark.parametrize("settings", [{}, {"decay": Sigmoid.Config(coupled=False), "pattern": Local.Config(window=5)}])
def test_a_chunk_reads_itself_exactly_and_its_past_nearly(settings):
    config, x = CONFIG.replace(**settings), inputs(12)
    mixer, full = built(config), built(config.replace(cache="full"))
    with torch.no_grad():
        want, _ = full(Chunk(x), full.initial_state(2))
        whole, _ = mixer(Chunk(x), mixer.initial_state(2))
        assert torch.equal(whole, want)
        for start in (mixer.initial_state(2), reserve(mixer.initial_state(2), 12)):
            state, parts = start, []
            for part in x.split([5, 1, 1, 5], dim=1):
                y, state = mixer(Chunk(part), state)
                parts.append(y)
            gap = (torch.cat(parts, 1) - want).abs().max() / want.abs().max()
            assert 1e-6 < gap < 0.02


@pytest.mark.skipif(not multiplies_int8("cpu"), reason="int8 products are not exact here")
@pytest.mark.parametrize(("heads", "kv_heads", "width", "past", "behind"), [(4, 4, 64, 700, None), (8, 2, 16, 900, 99)])
def test_one_query_multiplies_by_8_bits_as_it_would_by_their_numbers(heads, kv_heads, width, past, behind, monkeypatch):
    monkeypatch.setattr(int8, "LEAST", 50)
    random = torch.Generator().manual_seed(0)
    shape = (2, kv_heads, past, width)
    loud = 10 ** torch.randn(2, kv_heads, past, 1, generator=random)
    q, own = torch.randn(2, heads, 1, width, generator=random), torch.randn(2, 2, kv_heads, 1, width, generator=random)
    k = Quantized(packed(torch.randn(shape, generator=random)), own[0])
    v = Quantized(packed(loud * torch.randn(shape, generator=random)), own[1])
    scoring = Scoring(width**-0.5, sink=torch.randn(heads, generator=random))
    for positions in (None, torch.tensor([[past], [40]])):  # the second row sees 40 slots before its own
        visibility = Visibility(Band(behind=behind), positions, positions is None)
        assert int8.fits(q, k, visibility, scoring, False)
        got = attention.attention(q, k, v, visibility, scoring).out
        want = attention.attention(q, k.made(), v.made(), visibility, scoring).out
        assert (got - want).abs().max() < 1e-3 * want.abs().max()
        hidden = torch.cat([k.slots[:, :, :-41] * 0 + 7, k.slots[:, :, -41:]], 2)
        again = attention.attention(q, Quantized(hidden, own[0]), v, visibility, scoring).out
        assert (positions is None) == (not torch.equal(again[1], got[1]))


@pytest.mark.skipif(not multiplies_int8("cpu"), reason="int8 products are not exact here")
@pytest.mark.parametrize("settings", [{}, {"exclusive": True}, {"pattern": Local.Config(window=9)}])
def test_a_session_steps_by_8_bits_as_it_does_by_their_numbers(settings, monkeypatch):
    mixer, x, read = built(CONFIG.replace(**settings)).float(), inputs(30).float(), []
    outs, plain = [], attention.attend_int8
    monkeypatch.setattr(attention, "attend_int8", lambda *call: read.append(call) or plain(*call))
    for least in (4, 1 << 30):
        monkeypatch.setattr(int8, "LEAST", least)
        state, parts = reserve(mixer.initial_state(2), 40), []
        with torch.no_grad():
            for part in x.split([9] + [1] * 21, dim=1):
                y, state = mixer(Chunk(part), state)
                parts.append(y)
        outs.append(torch.cat(parts, 1))
    assert (outs[0] - outs[1]).abs().max() < 1e-3 * outs[1].abs().max()
    assert len(read) == (0 if "exclusive" in settings else 21)


@pytest.mark.parametrize("check", ["structure", "causality", "rows", "purity", "state_size", "reserved"])
def test_what_holds_of_every_state(check):
    """But for partitions: a token reads its chunk exactly, so that cuts show."""
    CHECKS[check](MixerSubject(lambda: CONFIG.build(DIM), dim=DIM, batch=2))


def test_sessions_step_and_estimates_count_8_bits():
    torch.manual_seed(0)
    model = kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer.cache": "int8"}).eval()
    tokens = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    drawn = []
    for recorded in (True, False):
        session = Session(model, room=80, recorded=recorded, seed=1)
        session.feed(tokens)
        drawn.append([int(session.step()) for _ in range(70)])
    assert drawn[0] == drawn[1]
    full = kinformer.build("gpt", recipe="tiny")
    with torch.no_grad():
        held = nbytes(model(tokens)[1])
    assert held == state_bytes(model, 20)
    # 2 layers, keys and values of 2 heads of 16 numbers: 16 + 3 bytes instead of 64
    assert state_bytes(full, 20) - held == 2 * 2 * 2 * 20 * (64 - 19)


def test_another_word_is_refused():
    with pytest.raises(KinformerError, match="int4"):
        SoftmaxAttention.Config(cache="int4").build(DIM)
