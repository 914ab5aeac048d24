"""The result of a training run, for its caller and its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """The result: ``steps`` done of ``total``; ``signal`` is the one that ended the run early, or 0.

    ``validation``: the best one's metrics, such as ``bits_per_byte``; the first is None in a run that was never
    validated.
    """

    steps: int
    total: int
    seconds: float
    tokens_per_second: float
    validation: Mapping[str, float | None]
    best_step: int | None
    signal: int = 0
