"""The learning rate as a function of the step alone: a linear rise, then a cosine (Loshchilov and Hutter 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True)
class Schedule:
    """``peak`` after ``warmup`` steps (a share of ``steps`` if below 1), ``floor * peak`` at the last of ``steps``."""

    peak: float
    floor: float
    warmup: float
    steps: int

    def __call__(self, step: float) -> float:
        """Learning rate of update number ``step``, counted from 0."""
        rise = round(self.warmup * self.steps) if self.warmup < 1 else round(self.warmup)
        if step < rise:
            return self.peak * (step + 1) / (rise + 1)
        done = min(1.0, (step - rise) / max(1, self.steps - 1 - rise))
        return self.peak * (self.floor + (1 - self.floor) * (1 + cos(pi * done)) / 2)
