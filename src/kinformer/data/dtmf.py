"""The sounds of telephone keys (dual-tone multi-frequency signalling, ITU-T Q.23, Q.24): sound without a file.

A key is the sum of a low and a high tone. Calls are numbered; each has keys, durations of tones and pauses, levels and
noise of its own, within what a receiver must bear: tones and pauses of 40 ms and more, frequencies 1.5 % off, one tone
up to 6 dB above the other, noise 10 to 40 dB below them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DTMF = "dtmf"
RATE = 8000
LOW, HIGH = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0, 1633.0)
PAD = ("123A", "456B", "789C", "*0#D")
KEYS = tuple("0123456789*#ABCD")
COUNTS = {"train": 8_000, "validation": 200, "test": 500}
TONE, PAUSE = (0.04, 0.16), (0.04, 0.2)
_SEEDS = {"train": 1, "validation": 2, "test": 3}
_AT = {key: (LOW[row], HIGH[column]) for row, keys in enumerate(PAD) for column, key in enumerate(keys)}


class Calls:
    """The calls of a split, of ``join`` keys (least and most; 3 to 7 if not given): see ``data.sound.Utterances``."""

    def __init__(self, split: str, join: tuple[int, int] | None = None) -> None:
        self.split = split
        count, (least, most) = COUNTS[split], self.keys(join)
        random = np.random.default_rng([_SEEDS[split], least, most])
        self.counts = random.integers(least, most + 1, count)
        self.pressed = random.integers(0, len(KEYS), (count, most))
        shape = (count, most)
        self.tones, self.pauses = (
            np.round(random.uniform(low, high, shape) * RATE).astype(np.int64) for low, high in (TONE, PAUSE)
        )
        self.before = np.round(random.uniform(*PAUSE, count) * RATE).astype(np.int64)
        real = np.arange(most) < self.counts[:, None]
        self.lengths = self.before + ((self.tones + self.pauses) * real).sum(1)

    @staticmethod
    def keys(join: tuple[int, int] | None) -> tuple[int, int]:
        """Return how many keys a call has, least and most."""
        return join or (3, 7)

    def samples(self, number: int) -> Tensor:
        """Return the samples of the call ``number``, float32 [time]."""
        random = np.random.default_rng([_SEEDS[self.split], number])
        sound = np.zeros(int(self.lengths[number]))
        level, at = 10 ** random.uniform(-1.5, -0.5), int(self.before[number])
        for place, key in enumerate(self._pressed(number)):
            time = np.arange(self.tones[number, place]) / RATE
            for hertz in _AT[key]:
                loud = level * 10 ** (random.uniform(-3, 3) / 20)
                angle = 2 * np.pi * (hertz * random.uniform(0.985, 1.015) * time + random.uniform())
                sound[at : at + len(time)] += loud * np.sin(angle)
            at += len(time) + int(self.pauses[number, place])
        noise = level * 10 ** (-random.uniform(10, 40) / 20)
        sound += noise * random.standard_normal(len(sound))
        return torch.from_numpy(sound.clip(-1, 1).astype(np.float32))

    def transcript(self, number: int) -> str:
        """Return the keys with spaces between."""
        return " ".join(self._pressed(number))

    def name(self, number: int) -> str:
        """Return the name of the call ``number`` in messages."""
        return f"call {number} of {self.split}"

    def _pressed(self, number: int) -> list[str]:
        return [KEYS[key] for key in self.pressed[number, : self.counts[number]]]
