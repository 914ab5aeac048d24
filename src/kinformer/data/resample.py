"""Another sampling rate by a windowed sinc, for sound at once or piece by piece (Smith 2002, Digital Audio Resampling).

    y(m) = sum over n of x(n) h(m from/to - n),   h(t) = c sinc(c t) cos^2(pi c t / 2 Z)   for |c t| < Z

c is 0.94 of the lower rate by the old one, so that what the new rate cannot hold is cut off; Z = 12 zero crossings.
"""

from __future__ import annotations

from math import ceil, gcd

import torch
from torch import Tensor
from torch.nn import functional

CROSSINGS, PASSED = 12, 0.94


class Resampler:
    """The conversion of sound of ``rate`` samples a second to ``to``. Fed in pieces it returns what it would for the
    whole.

    ``to / rate`` in lowest terms is n / o: every o samples that come give n, each by a filter of its own.
    """

    def __init__(self, rate: int, to: int) -> None:
        self.same = rate == to
        self.old, self.new = (item // gcd(rate, to) for item in (rate, to))
        # c: 0.94 of the lower rate's band, so that nothing beyond it is folded back.
        cut = PASSED * min(self.old, self.new) / self.old
        self.reach = ceil(CROSSINGS / cut)
        at = torch.arange(self.new, dtype=torch.float64)[:, None] * self.old / self.new
        distance = cut * (at - torch.arange(-self.reach, self.reach + self.old, dtype=torch.float64))
        window = (distance.clamp(-CROSSINGS, CROSSINGS) * torch.pi / (2 * CROSSINGS)).cos().square()
        # h(t) = c sinc(c t) cos^2(pi c t / 2 Z), one filter for each of the ``new`` phases
        self.filters = (cut * torch.sinc(distance) * window).float()[:, None]
        self._waiting = torch.zeros(self.reach)
        self._came = self._gave = 0

    def feed(self, samples: Tensor, last: bool = False) -> Tensor:
        """Return the new samples that follow from ``samples`` [time]; with ``last``
        all, ceil(time to / rate) samples in sum."""
        if self.same:
            return samples
        self._came += len(samples)
        ahead = [torch.zeros(self.reach + self.old)] if last else []
        waiting = torch.cat([self._waiting, samples, *ahead])
        blocks = max(0, (len(waiting) - 2 * self.reach) // self.old)
        if not blocks:
            self._waiting = waiting
            return samples[:0]
        used = waiting[: blocks * self.old + 2 * self.reach]
        made = functional.conv1d(used[None, None], self.filters, stride=self.old)[0].T.flatten()
        self._waiting = waiting[blocks * self.old :]
        if last:
            made = made[: ceil(self._came * self.new / self.old) - self._gave]
        self._gave += len(made)
        return made


def resample(samples: Tensor, rate: int, to: int) -> Tensor:
    """Return ``samples`` [time] of ``rate`` samples a second at the rate ``to``."""
    return Resampler(rate, to).feed(samples, last=True)
