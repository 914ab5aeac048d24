"""How long a step takes once nothing is done for the first time: plans, compiled code and buffers are there."""

from __future__ import annotations

from collections.abc import Callable

PROBES = 20


def seconds_per_step(step: Callable[[int], object], limit: float, clock: Callable[[], float]) -> float:
    """The mean of the later half of at most ``PROBES`` steps, after one more that may take as long as it likes.

    It is a mean because rows of different lengths take different times, and a run takes their sum.

    step: makes the step of a number and returns when it is over.
    limit: seconds after which no further step is tried, from the third on.
    clock: gives seconds; with several processes the same to all, so that they try as many.
    """
    step(0)
    marks = [clock()]
    while len(marks) < 3 or (len(marks) <= PROBES and marks[-1] - marks[0] < limit):
        step(len(marks))
        marks.append(clock())
    later = marks[(len(marks) - 1) // 2 :]
    return (later[-1] - later[0]) / (len(later) - 1)
