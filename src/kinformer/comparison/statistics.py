"""Whether two members differ: Welch's t-test (Welch 1947), and Holm's correction for several tests (Holm 1979)."""

from __future__ import annotations

from collections.abc import Sequence
from math import acos, atan, cos, exp, inf, lgamma, pi, sqrt
from statistics import mean, variance
from typing import NamedTuple

_INTERVALS, _NOTHING = 2000, 1e-18


class Welch(NamedTuple):
    """``difference`` of the means (first less second), ``t``, ``degrees`` of freedom, two-sided ``p``."""

    difference: float
    t: float
    degrees: float
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> Welch | None:
    """Return the test of two samples of unlike variance; None where one has fewer than two values.

    t = (mean_1 - mean_2) / sqrt(s_1^2 / n_1 + s_2^2 / n_2),
    degrees = (s_1^2 / n_1 + s_2^2 / n_2)^2 / sum_i (s_i^2 / n_i)^2 / (n_i - 1)
    """
    if min(len(first), len(second)) < 2:
        return None
    difference = mean(first) - mean(second)
    errors = [variance(sample) / len(sample) for sample in (first, second)]
    total = sum(errors)
    if total == 0.0:
        return Welch(difference, 0.0 if difference == 0 else inf, inf, 1.0 if difference == 0 else 0.0)
    degrees = total**2 / sum(
        error**2 / (len(sample) - 1) for error, sample in zip(errors, (first, second), strict=True)
    )
    t = difference / sqrt(total)
    return Welch(difference, t, degrees, two_sided(t, degrees))


def two_sided(t: float, degrees: float) -> float:
    """Return P(|T| > |t|) of Student's distribution with one degree of freedom or more.

    With x = sqrt(degrees) tan(a), its density is that of cos(a)^(degrees - 1), which Simpson's rule integrates to where
    nothing is left of it.
    """
    start = atan(abs(t) / sqrt(degrees))
    end = acos(cos(start) * _NOTHING ** (1 / (degrees - 1))) if degrees > 1 else pi / 2
    width = (end - start) / _INTERVALS
    weights = [1, *([4, 2] * (_INTERVALS // 2 - 1)), 4, 1]
    heights = [max(0.0, cos(start + index * width)) ** (degrees - 1) for index in range(_INTERVALS + 1)]
    area = width / 3 * sum(weight * height for weight, height in zip(weights, heights, strict=True))
    return min(1.0, 2 * area * exp(lgamma((degrees + 1) / 2) - lgamma(degrees / 2)) / sqrt(pi))


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p of several tests, corrected so that all of them together are wrong as seldom as one: the k-th
    smallest of n times n - k + 1, and never less than a smaller one's."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda item: ps[item])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted
