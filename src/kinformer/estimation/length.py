"""Costs at any length from runs at short ones: counts are exact quadratics of the length where tiles fall alike."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from kinformer.estimation.parts import Costs

DIRECT = 2048
"""Up to this length costs are measured as they are."""
STEP = 512
"""A multiple of every kernel's tile: lengths that differ by it are cut alike."""


def at_length(measure: Callable[[int], Costs], length: int, horizon: int) -> Costs:
    """Return ``measure(length)``; a long one is continued from three lengths beyond ``horizon``, the widest window.

    Whether the costs are a quadratic is seen at two further lengths, one of them a horizon beyond the others. Irregular
    patterns, and segments that are cut differently at every length, fail there and are measured as they are.
    """
    windows = -(-horizon // STEP)
    start, checks = length % STEP + STEP * max(2, windows), (3, 4 + windows)
    if length <= max(DIRECT, start + checks[-1] * STEP):
        return measure(length)
    samples = [measure(start + i * STEP) for i in range(3)]
    for number in checks:
        want, got = through(samples, start, STEP, start + number * STEP), measure(start + number * STEP)
        if any(want.get(key, 0) != got.get(key, 0) for key in want.keys() | got.keys()):
            return measure(length)
    return through(samples, start, STEP, length)


def through(samples: list[Costs], start: int, step: int, length: int) -> Costs:
    """Return the value at ``length`` of the parabola through three samples, ``step`` apart from ``start`` on."""
    steps = Fraction(length - start, step)
    costs = {}
    for key in samples[0].keys() | samples[1].keys() | samples[2].keys():
        first, second, third = (sample.get(key, 0) for sample in samples)
        curve = steps * (steps - 1) / 2 * (third - 2 * second + first)
        costs[key] = round(first + steps * (second - first) + curve)
    return costs
