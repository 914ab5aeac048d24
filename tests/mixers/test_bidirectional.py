"""Two-sided attention: the contract, its limits, and a dense oracle written here."""

import pytest
import torch

from kinformer.core.encoder import SequenceContext
from kinformer.family.kinds import kinds
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.parts.patterns.sequence import Columns, Full, PerHead, Window
from kinformer.parts.projections import Convolved, MultiHeadGlobal
from kinformer.parts.relative_positions import Alibi, Rope, Shaw
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject, verify_config

MIXERS = {
    "full": {},
    "window": {"pattern": Window(window=5)},
    "by kind": {"pattern": Window(window=5), "projection": MultiHeadGlobal.Config()},
    "dilated": {"pattern": Window(window=3, dilations=(1, 3)), "projection": MultiHeadGlobal.Config()},
    "per head": {"pattern": PerHead.Config(patterns=(Full.Config(), Window(window=2)))},
    "rope": {"pattern": Window(window=6), "position": Rope.Config()},
    "shaw": {"pattern": Window(window=6), "position": Shaw.Config(max_distance=4)},
}


def config(**settings):
    return BidirectionalAttention.Config(num_heads=2, **settings)


COMPILED = ("full", "dilated", "shaw")
"""A graph takes seconds to make: one mixer of each kernel is compiled, "full" also without a global input."""


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in MIXERS for check in ENCODER_CHECKS if check != "compile" or name in COMPILED],
)
def test_contract(name, check):
    settings = MIXERS[name]
    impls = {"reference": lambda: config(**settings, impl="reference").build(16)}
    sizes = (4,) if check == "compile" and name != "full" else (0, 4)
    ENCODER_CHECKS[check](EncoderMixerSubject(lambda: config(**settings).build(16), impls=impls, num_globals=sizes))


def dense(mixer, x, text):
    """All pairs at once, row by row: what a token may see is written out."""
    q, k, v = mixer.projection(x)
    own = mixer.projection.global_projection()
    heads, time, num_global = q.shape[1], x.shape[1], text.num_global
    outputs = []
    for row in range(len(x)):
        own_globals = [] if text.global_positions is None else text.global_positions[row].tolist()
        places = [num_global + position for position in own_globals if position >= 0]
        valid = torch.ones(time, dtype=torch.bool) if text.valid is None else text.valid[row]
        index = torch.arange(time) - num_global
        merged = []
        for head in range(heads):
            pattern = mixer.pattern.sized(time - num_global).at(head)
            seen = pattern.allowed(index[:, None], index[None]) & (index[:, None] >= 0) & (index[None] >= 0)
            seen[:, :num_global] = True
            seen[:num_global] = True
            seen[:, places] = True
            seen[places] = True
            scores = (q[row, head] @ k[row, head].T) * q.shape[-1] ** -0.5
            y = scores.masked_fill(~(seen & valid), -torch.inf).softmax(-1) @ v[row, head]
            if own is not None and places:
                part = slice(head * q.shape[-1], (head + 1) * q.shape[-1])
                qg, kg, vg = (each(x[row])[:, part] for each in (own.query, own.key, own.value))
                scores = (qg[places] @ kg.T) * q.shape[-1] ** -0.5
                y = y.index_put((torch.tensor(places),), scores.masked_fill(~valid, -torch.inf).softmax(-1) @ vg)
            merged.append(y)
        outputs.append(torch.where(valid[:, None], mixer.out(torch.cat(merged, -1)), 0))
    return torch.stack(outputs)


@pytest.mark.parametrize("name", ["full", "window", "by kind", "dilated", "per head"])
def test_it_is_what_the_dense_oracle_says(name):
    mixer = config(**MIXERS[name]).build(16)
    subject = EncoderMixerSubject(lambda: mixer, dim=16)
    module = subject.build()
    for plain in subject.cases():
        torch.testing.assert_close(module(*plain[1:]), dense(module, *plain[1:]), rtol=0, atol=1e-12)
        case, _, valid = subject.padded(plain)
        clean = case._replace(inputs=case.inputs.nan_to_num(nan=0.0))
        torch.testing.assert_close(module(*case[1:]), dense(module, *clean[1:]), rtol=0, atol=1e-12)


def test_many_global_tokens_are_projected_before_they_look():
    """Beyond head_dim of them the products through x would cost more: both ways give one result."""
    torch.manual_seed(0)
    mixer = config(pattern=Window(window=3), projection=MultiHeadGlobal.Config()).build(16).double()
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    for count in (3, 8, 20):
        text = SequenceContext(global_positions=torch.arange(count).expand(2, -1))
        torch.testing.assert_close(mixer(x, text), dense(mixer, x, text), rtol=0, atol=1e-12)


def test_a_window_as_wide_as_the_text_is_exact_attention():
    torch.manual_seed(0)
    full, wide, narrow = (config(**one).build(16) for one in ({}, *({"pattern": Window(window=w)} for w in (19, 18))))
    wide.load_state_dict(full.state_dict())
    narrow.load_state_dict(full.state_dict())
    x = torch.randn(2, 20, 16)
    torch.testing.assert_close(wide(x), full(x))
    assert (narrow(x) - full(x)).abs().max() > 1e-4


def test_work_is_linear_in_length():
    counts = []
    for time in (1024, 2048):
        with torch.device("meta"):
            mixer = config(pattern=Window(window=32), projection=MultiHeadGlobal.Config()).build(16)
            x = torch.zeros(1, time, 16)
            text = SequenceContext(global_positions=torch.zeros(1, 2, dtype=torch.int64))
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            mixer(x, text)
        counts.append(counter.get_total_flops())
    assert counts[1] < 2.1 * counts[0]


@pytest.mark.parametrize("name", MIXERS)
def test_configs_survive_files(name):
    verify_config(
        config(**MIXERS[name]), kinds(), subject=lambda one: Stateless(EncoderMixerSubject(lambda: one.build(16)))
    )


class Stateless:
    """An encoder's subject, as ``verify_config`` asks for one."""

    def __init__(self, subject):
        self.subject, self.make, self.batch, self.time = subject, subject.make, subject.batch, subject.time

    def build(self):
        return self.subject.build()

    def inputs(self, batch, time, seed):
        return self.subject.inputs(time, seed)

    def start(self, module, batch):
        return None

    def run(self, module, inputs, state):
        return module(inputs), None


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(KinformerError, match="2 heads, but the mixer has 4"):
        BidirectionalAttention.Config(
            num_heads=4, pattern=PerHead.Config(patterns=(Full.Config(), Columns.Config()))
        ).build(16)
    with pytest.raises(KinformerError, match="is for decoders"):
        config(projection=Convolved.Config()).build(16)
    with pytest.raises(KinformerError, match="window must be 0"):
        Window(window=-1)
    assert Alibi.Config().kind == "alibi"
