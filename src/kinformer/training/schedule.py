"""The learning rate as a function of the step alone: a linear rise, then a cosine (Loshchilov and Hutter 2017), a line
(Devlin et al. 2018), a fall with the inverse square root of the step (Vaswani et al. 2017, section 5.3), or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True)
class Schedule:
    """The schedule: ``peak`` after ``warmup`` steps (a share of ``steps`` if below 1); then by
    ``kind``: ``cosine`` or ``linear``, with ``floor * peak`` at the last of ``steps``; ``inverse-sqrt``, peak *
    sqrt(warmup / step), not below ``floor * peak``; or ``constant``, as ``plateau`` is until a plateau comes
    (``training.plateau``)."""

    peak: float
    floor: float
    warmup: float
    steps: int
    kind: str = "cosine"

    def __call__(self, step: float) -> float:
        """Return the learning rate of update number ``step``, counted from 0."""
        rise = round(self.warmup * self.steps) if self.warmup < 1 else round(self.warmup)
        if step < rise:
            return self.peak * (step + 1) / (rise + 1)
        if self.kind in ("constant", "plateau"):
            return self.peak
        if self.kind == "inverse-sqrt":
            # peak sqrt(warmup / step), which is ``peak`` where the rise ends
            return self.peak * max(self.floor, ((rise + 1) / (step + 1)) ** 0.5)
        done = min(1.0, (step - rise) / max(1, self.steps - 1 - rise))
        left = 1 - done if self.kind == "linear" else (1 + cos(pi * done)) / 2
        return self.peak * (self.floor + (1 - self.floor) * left)
