"""Training utterances changed at random: their speed, and masks over their spectrograms.

Everything random comes from a generator of the utterance in its step, so that it follows from the run's seed.

``speed``        played 0.9, 1 or 1.1 times as fast, pitch included (Ko et al. 2015, Audio Augmentation)
``specaugment``  two bands of filters and two stretches of time become 0, which is the mean of normalised features
                 (Park et al. 2019, SpecAugment, arXiv 1904.08779, section 2: their policies without the time warp). A
                 band has up to 27 / 80 of the filters, a stretch up to a second and a fifth of the utterance.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from kinformer.data.filterbank import HOP
from kinformer.data.resample import resample

SPEEDS = (90, 100, 110)
"""Speeds in per cent."""
MASKS = 2
BAND, SECONDS, SHARE = 27 / 80, 1.0, 0.2


def with_speed(samples: Tensor, generator: Generator) -> Tensor:
    """Return the sound ``samples`` float32 [time] at one of the speeds: a hundred samples at one rate are ``speed`` at
    another."""
    speed = SPEEDS[int(torch.randint(len(SPEEDS), (), generator=generator))]
    return samples if speed == 100 else resample(samples, speed, 100)


def masked(features: Tensor, generator: Generator) -> Tensor:
    """Return normalised features [frames, mels] with bands and stretches of 0."""
    features = features.clone()
    frames, mels = features.shape
    for _ in range(MASKS):
        begin, end = _stretch(mels, int(BAND * mels), generator)
        features[:, begin:end] = 0
        begin, end = _stretch(frames, int(min(SECONDS / HOP, SHARE * frames)), generator)
        features[begin:end] = 0
    return features


def _stretch(size: int, longest: int, generator: Generator) -> tuple[int, int]:
    """Return where a stretch of 0 to ``longest`` of this many places begins and ends; each length is as probable."""
    length = int(torch.randint(longest + 1, (), generator=generator))
    begin = int(torch.randint(size - length + 1, (), generator=generator))
    return begin, begin + length
