"""Frames of sound as an input: the convolutions over whole utterances, chunks of a causal model, and refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import kinformer
from kinformer.inputs.signals import Frames, windows
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MODEL_CHECKS, ModelSubject

SPEECH = {"input": {"kind": "frames", "mels": 3, "convolutions": 1}, "head": {"kind": "ctc", "classes": 5}}


@pytest.mark.parametrize("convolutions", [1, 2, 3])
@pytest.mark.parametrize("frames", [1, 8, 21])
def test_convolutions_of_windows_are_those_of_the_utterance(convolutions, frames):
    config = Frames.Config(mels=5, convolutions=convolutions)
    input = config.build(6).double()
    features = torch.randn(frames, 5, dtype=torch.float64)
    values = windows(features, config.width, config.stride)[None]
    got = input(values, torch.arange(values.shape[1])[None])[0]
    behind = -frames % config.stride
    x = functional.pad(features.T[None], (config.width - config.stride, behind))
    for layer in input.convolutions:
        convolution = nn.Conv1d(x.shape[1], 6, 3, stride=2).double()
        convolution.weight.data, convolution.bias.data = layer.weight.view(6, 3, -1).mT, layer.bias
        x = functional.gelu(convolution(x))
    assert x.shape[2] == len(got) and (x[0].T - got).abs().max() < 1e-12


def test_without_convolutions_every_frame_is_a_position():
    input = Frames.Config(mels=5, convolutions=0).build(6)
    features = torch.randn(7, 5)
    got = input(windows(features, 1, 1)[None], torch.arange(7)[None])
    assert torch.equal(got[0], input.projection(features))


class FramesSubject(ModelSubject):
    """A causal model of frames; what stands at padding is no number at all."""

    def __init__(self, make):
        super().__init__(make, 0)

    def inputs(self, batch, time, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, time, 3, 3, generator=generator, dtype=torch.float64)

    def spoil(self, inputs, valid):
        return inputs.masked_fill(~valid[..., None, None], torch.nan)

    def disturb(self, inputs, since, factor):
        other = factor * self.inputs(inputs.shape[0], inputs.shape[1], seed=17)
        return torch.cat([inputs[:, :since], other[:, since:]], dim=1)


@pytest.mark.parametrize("check", MODEL_CHECKS)
@pytest.mark.parametrize("member", ["linear-transformer", "gpt"])
def test_a_causal_model_of_frames_keeps_the_contract(member, check):
    MODEL_CHECKS[check](FramesSubject(lambda: kinformer.build(member, recipe="tiny", set=SPEECH)))


def test_refusals():
    model = kinformer.build("gpt", recipe="tiny", set=SPEECH)
    with pytest.raises(
        KinformerError, match=r"frames must be floats \[batch, time, width, mels\] = \[batch, time, 3, 3\]"
    ):
        model(torch.randn(2, 5, 3, 4))
    with pytest.raises(KinformerError, match="convolutions must lie between 0 and 6, but is 7"):
        Frames.Config(convolutions=7)
    with pytest.raises(KinformerError, match="does not read token ids"):
        _ = model.vocab_size


def test_no_frames_are_one_sentence():
    config = Frames.Config(mels=3)
    with pytest.raises(KinformerError, match="frames have time = 0, but must hold one position or more"):
        config.build(8).check(torch.zeros(2, 0, config.width, 3))
