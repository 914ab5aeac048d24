"""An LSTM in both directions: the contract, and PyTorch's own on packed rows."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.mixers.recurrent import BidirectionalLSTM
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_CHECKS, EncoderMixerSubject

SUBJECT = {"num_globals": (0,), "global_tokens": False}


def make(impl="auto"):
    return BidirectionalLSTM.Config(impl=impl).build(16)


@pytest.mark.parametrize("check", [check for check in ENCODER_CHECKS if check not in ("compile", "derivatives")])
def test_contract(check):
    impls = {impl: lambda impl=impl: make(impl) for impl in ("reference", "native")}
    ENCODER_CHECKS[check](EncoderMixerSubject(make, impls=impls, **SUBJECT))


def test_derivatives():
    subject = EncoderMixerSubject(lambda: make("reference"), time=9, **SUBJECT)
    if "derivatives" in ENCODER_CHECKS:
        ENCODER_CHECKS["derivatives"](subject)


def test_pytorchs_own_on_packed_rows():
    mixer = make().double()
    x, lengths = torch.randn(3, 11, 16, dtype=torch.float64), torch.tensor([11, 4, 7])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    want, _ = pad_packed_sequence(mixer.rnn(packed)[0], batch_first=True)
    valid = torch.arange(11) < lengths[:, None]
    assert (mixer(x, SequenceContext(valid)) - want).abs().max() < 1e-12
    whole, _ = mixer.rnn(x.transpose(0, 1))
    assert (mixer(x) - whole.transpose(0, 1)).abs().max() < 1e-12


def test_refusals():
    with pytest.raises(KinformerError, match="dim = 15 is odd"):
        BidirectionalLSTM.Config().build(15)
    with pytest.raises(KinformerError, match="the mixer lstm does not support global tokens"):
        kinformer.build("longformer", recipe="tiny", set={"layers.*.mixer": {"kind": "lstm"}})
