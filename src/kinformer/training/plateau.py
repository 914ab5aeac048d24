"""A learning rate that falls when validations stop to improve, as torch.optim.lr_scheduler.ReduceLROnPlateau lowers it.

A validation counts as better where it passes the best by a relative 0.0001. After more than ``patience`` validations in
a row that do not, the rate is multiplied by ``factor``, down to ``floor``, and the count begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

THRESHOLD = 1e-4


@dataclass
class Plateau:
    """The state: ``share`` of the highest learning rate, the ``best`` metric (None before the first) and how many
    validations in a row were no better (``bad``). ``floor`` is the least share; ``lower``: less of the metric is
    better."""

    factor: float
    patience: int
    floor: float
    lower: bool
    share: float = 1.0
    best: float | None = None
    bad: int = 0

    def see(self, value: float) -> bool:
        """Take the metric of a validation; return whether the learning rate falls."""
        if self._better(value):
            self.best, self.bad = value, 0
            return False
        self.bad += 1
        if self.bad <= self.patience:
            return False
        before, self.share, self.bad = self.share, max(self.share * self.factor, self.floor), 0
        return self.share < before

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        # As PyTorch has it: relative to the best, whatever its sign.
        return value < self.best * (1 - THRESHOLD) if self.lower else value > self.best * (1 + THRESHOLD)

    @property
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"share": self.share, "best": self.best, "bad": self.bad}

    def load(self, state: Mapping[str, Any], comparable: bool = True) -> None:
        """Go on from :attr:`state`; not ``comparable``: later metrics are of another model, so none is the best."""
        self.share = float(state["share"])
        if comparable:
            self.best, self.bad = state["best"], int(state["bad"])
