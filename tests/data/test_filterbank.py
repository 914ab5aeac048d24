"""Log-mel features against the formula, term by term, and against transformers; norms and windows, cut or whole."""

from math import ceil, cos, log, log10, pi

import numpy as np
import pytest
import torch

from kinformer.inputs.signals import FLOOR, Filterbank, RunningNorm, mel_filters, normalised, windows
from kinformer.runtime.errors import KinformerError

RATE, MELS = 2000, 5


def mel(hertz):
    return 2595 * log10(1 + hertz / 700)


def by_formula(samples):
    """Features of one frame after the other, by sums over samples."""
    size, hop, points = 50, 20, 64
    edges = [700 * (10 ** (mel(RATE / 2) * i / (MELS + 1) / 2595) - 1) for i in range(MELS + 2)]
    rows = []
    for start in range(0, len(samples) - size + 1, hop):
        frame = [samples[start + i] * (0.5 - 0.5 * cos(2 * pi * i / size)) for i in range(size)]
        power = [
            abs(sum(x * np.exp(-2j * pi * k * i / points) for i, x in enumerate(frame))) ** 2
            for k in range(points // 2 + 1)
        ]
        row = []
        for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
            total = 0.0
            for k, each in enumerate(power):
                hertz = k * RATE / points
                rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
                total += max(0.0, min(rising, falling)) * each
            row.append(log(max(FLOOR, total)))
        rows.append(row)
    return torch.tensor(rows)


def test_the_formula():
    samples = torch.randn(190, generator=torch.Generator().manual_seed(0))
    bank = Filterbank(RATE, MELS)
    got = bank(samples)
    assert got.shape == (8, MELS) == (bank.frames(190), MELS)
    assert torch.allclose(got, by_formula(samples.tolist()), atol=1e-4)
    assert torch.equal(bank(torch.zeros(190)), torch.full((8, MELS), log(FLOOR)))


def test_transformers():
    utils = pytest.importorskip("transformers.audio_utils")
    samples = 0.1 * torch.randn(4000, generator=torch.Generator().manual_seed(1))
    filters = utils.mel_filter_bank(129, 40, 0.0, 4000.0, 8000, norm=None, mel_scale="htk")
    assert np.abs(filters - mel_filters(8000, 256, 40).numpy()).max() < 1e-6
    window = utils.window_function(200, "hann", periodic=True)
    want = utils.spectrogram(
        samples.double().numpy(), window, frame_length=200, hop_length=80, fft_length=256, power=2.0, center=False,
        mel_filters=filters, mel_floor=FLOOR, log_mel="log",
    )  # fmt: skip
    assert np.abs(Filterbank(8000, 40)(samples).numpy() - want.T).max() < 1e-3


def test_sound_shorter_than_a_frame_is_one():
    bank = Filterbank(RATE, MELS)
    assert bank(torch.ones(7)).shape == (1, MELS) and bank.frames(7) == bank.frames(50) == 1
    assert bank.frames(69) == 1 and bank.frames(70) == 2


def test_refusals():
    with pytest.raises(KinformerError, match="some filter does not contain a frequency at 8,000 samples a second"):
        Filterbank(8000, 120)
    with pytest.raises(KinformerError, match="sampling rate of 40 a second is too low"):
        Filterbank(40, 4)


def test_an_utterance_is_normalised():
    x = normalised(torch.randn(30, 4) * 5 + 3)
    assert x.mean(0).abs().max() < 1e-5 and (x.std(0, correction=0) - 1).abs().max() < 1e-5
    assert not normalised(torch.full((3, 4), -7.0)).any()


def test_a_running_norm_knows_the_past_alone():
    x = torch.randn(300, 4) * 3 - 2
    cut = RunningNorm()
    pieces = torch.cat([cut(x[a:b]) for a, b in ((0, 1), (1, 1), (1, 120), (120, 300))])
    assert torch.allclose(pieces, RunningNorm()(x), atol=1e-6)
    changed = x.clone()
    changed[200:] += 9
    assert torch.equal(RunningNorm()(changed)[:200], RunningNorm()(x)[:200])
    late = RunningNorm()(torch.randn(20_000, 4) * 3 - 2)[-5000:]
    assert late.mean().abs() < 0.05 and (late.std() - 1).abs() < 0.05


@pytest.mark.parametrize("frames", [1, 4, 7, 9])
def test_windows_overlap_and_none_sees_what_follows(frames):
    x = torch.arange(1.0, frames * 2 + 1).view(frames, 2)
    got = windows(x, 7, 4)
    assert got.shape == (ceil(frames / 4), 7, 2)
    padded = torch.cat([torch.zeros(3, 2), x, torch.zeros(8, 2)])
    for position, window in enumerate(got):
        assert torch.equal(window, padded[4 * position : 4 * position + 7])
    assert torch.equal(windows(x, 1, 1), x[:, None])
