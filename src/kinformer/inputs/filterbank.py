"""Log-mel filterbanks, the features of speech recognition (Davis and Mermelstein 1980), and their normalisation.

    mel(f) = 2595 log10(1 + f / 700)
    x(t, m) = log max(floor, sum over f of w(m, f) |DFT(hann * samples of frame t)(f)|^2)

w(m, .) are triangles between frequencies evenly spaced in mel; a frame is 25 ms long and begins 10 ms after the frame
before. A feature depends on one frame only, so sound can arrive piece by piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError, plural

FRAME, HOP = 0.025, 0.010
FLOOR = 1e-6
LEAST_DEVIATION = 0.1
PRIOR_FRAMES, PRIOR_MEAN, PRIOR_DEVIATION = 100, -6.0, 4.0


CHARACTERS = "characters"
"""The unit of spelled transcripts: a symbol is a character, not a word."""


class Filterbank:
    """The map of sound with ``rate`` samples a second to features [frames, mels]."""

    def __init__(self, rate: int, mels: int) -> None:
        self.size, self.hop = round(rate * FRAME), round(rate * HOP)
        if self.hop < 1:
            raise KinformerError(f"a sampling rate of {rate} a second is too low for speech; give 4,000 or more.")
        # The next power of two, for which the transform is fastest.
        self.points = 1 << (self.size - 1).bit_length()
        self.window = torch.hann_window(self.size)
        self.filters = mel_filters(rate, self.points, mels)

    def frames(self, samples: int) -> int:
        """Return the number of frames of this many samples: a last part of one is
        dropped, but less than one is filled up."""
        return 1 + max(0, samples - self.size) // self.hop

    def __call__(self, samples: Tensor) -> Tensor:
        """Return features float32 [frames, mels] of ``samples`` [time]."""
        if len(samples) < self.size:
            samples = torch.cat([samples, samples.new_zeros(self.size - len(samples))])
        power = torch.fft.rfft(samples.unfold(0, self.size, self.hop) * self.window, self.points).abs().square()
        # x(t, m) = log max(floor, sum_f w(m, f) |DFT|^2)
        return (power @ self.filters).clamp_min(FLOOR).log()


def mel_filters(rate: int, points: int, mels: int) -> Tensor:
    """Return triangles w [points // 2 + 1, mels] over the frequencies of a transform of this many points.

    Errors: ``KinformerError`` where there are more filters than frequencies tell apart.
    """
    highest = 2595 * torch.log10(torch.tensor(1 + rate / 1400, dtype=torch.float64))
    edges = 700 * (10 ** (torch.linspace(0, 1, mels + 2, dtype=torch.float64) * highest / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, points // 2 + 1, dtype=torch.float64)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    # A triangle is the lesser of its rising and its falling line, cut at 0.
    filters = torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp_min(0)
    if not bool((filters > 0).any(0).all()):
        raise KinformerError(
            f"`set` input.mels={mels}: some filter does not contain a frequency at {plural(rate, 'sample')} a second; "
            "give fewer."
        )
    return filters.float()


def normalised(features: Tensor) -> Tensor:
    """Return features [frames, mels] of an utterance with mean 0 and deviation 1 for every filter."""
    return (features - features.mean(0)) / features.std(0, correction=0).clamp_min(LEAST_DEVIATION)


class RunningNorm:
    """The normalisation of sound whose end is not known: by the mean and deviation up to and with each frame.

    What sound usually has counts as much as ``PRIOR_FRAMES`` frames that came before.
    """

    def __init__(self) -> None:
        self.count = PRIOR_FRAMES
        usual = torch.tensor([PRIOR_MEAN, PRIOR_MEAN**2 + PRIOR_DEVIATION**2], dtype=torch.float64)
        self.sums = usual[:, None] * PRIOR_FRAMES

    def __call__(self, features: Tensor) -> Tensor:
        """Return the next frames [frames, mels], normalised."""
        # In float64: the variance is a small difference of two large sums.
        x = features.double()
        sums = torch.stack([x, x.square()]).cumsum(1) + self.sums[:, None]
        counts = self.count + torch.arange(1, len(x) + 1)[:, None]
        mean, square = sums / counts
        if len(x):
            self.count, self.sums = self.count + len(x), sums[:, -1]
        return ((x - mean) / (square - mean.square()).clamp_min(LEAST_DEVIATION**2).sqrt()).to(features.dtype)


def normalised_features(samples: Tensor, bank: Filterbank, causal: bool) -> Tensor:
    """Return features [frames, mels] of sound, float32 [time]; for a ``causal`` model, normalised by the frames so
    far."""
    features = bank(samples)
    return RunningNorm()(features) if causal else normalised(features)


def features_of(samples: Tensor, bank: Filterbank, width: int, stride: int, causal: bool) -> Tensor:
    """Return :func:`normalised_features` of sound, float32 [time], as positions [positions, width, mels]."""
    return windows(normalised_features(samples, bank, causal), width, stride)


def windows(features: Tensor, width: int, stride: int) -> Tensor:
    """Return features [frames, mels] as positions [ceil(frames / stride), width, mels].

    A position is ``stride`` new frames behind the ``width - stride`` before them; zeros fill up both ends.
    """
    before = features.new_zeros(width - stride, features.shape[1])
    after = features.new_zeros(-len(features) % stride, features.shape[1])
    return torch.cat([before, features, after]).unfold(0, width, stride).mT
