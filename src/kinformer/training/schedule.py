"""The learning rate: its schedule over the steps of a stage or of the run, and what plateaus have left of it.

The schedule is a function of the step alone: a linear rise, then a cosine (Loshchilov and Hutter 2017), a line (Devlin
et al. 2018), a fall with the inverse square root of the step (Vaswani et al. 2017, section 5.3), or nothing. A plateau
lowers the rate when validations stop improving, as torch.optim.lr_scheduler.ReduceLROnPlateau does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kinformer.runtime.parsing import JsonObject
from kinformer.training.metric import Metric
from kinformer.training.settings import Settings
from kinformer.training.stages import Stage

THRESHOLD = 1e-4
"""The relative improvement from which on a validation counts as better."""


@dataclass(frozen=True)
class Schedule:
    """The schedule: ``peak`` after ``warmup`` steps (a share of ``steps`` if below 1); then by
    ``kind``: ``cosine`` or ``linear``, with ``floor * peak`` at the last of ``steps``; ``inverse-sqrt``, peak *
    sqrt(warmup / step), not below ``floor * peak``; or ``constant``, as ``plateau`` is until a
    :class:`Plateau` comes."""

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
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.floor + (1 - self.floor) * left)


@dataclass
class Plateau:
    """The share of the highest learning rate that plateaus have left.

    A validation counts as better where it passes the best by a relative ``THRESHOLD``. After more than ``patience``
    validations in a row that do not, the share is multiplied by ``factor``, down to ``floor``, and counting starts
    again. ``best``: the best metric, None before the first; ``bad``: how many validations in a row were no better;
    ``lower``: whether less of the metric is better.
    """

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
    def state(self) -> dict[str, float | None]:
        """Return what a checkpoint holds."""
        return {"share": self.share, "best": self.best, "bad": self.bad}

    def load(self, state: JsonObject, comparable: bool = True) -> None:
        """Go on from :attr:`state`; not ``comparable``: later metrics are of another model, so none is the best."""
        self.share = float(state["share"])
        if comparable:
            self.best, self.bad = state["best"], int(state["bad"])


class LearningRate:
    """The learning rate in ``stage``, from step ``step`` on; ``numbers`` are those of the checkpoint of that step.

    With the schedule ``plateau`` it follows ``metric``. A stage that begins a schedule begins at the full rate, and one
    that changes the model has no best validation yet.
    """

    def __init__(self, settings: Settings, stage: Stage, metric: Metric, numbers: JsonObject, step: int) -> None:
        self.settings, self.span, self.metric = settings, stage.rates, metric
        self.plateau: Plateau | None = None
        if settings.schedule == "plateau":
            limits = (settings.plateau_factor, settings.plateau_patience, settings.min_lr_ratio)
            self.plateau = Plateau(*limits, metric.lower_is_better)
            if "plateau" in numbers and step > stage.rates[0]:
                self.plateau.load(numbers["plateau"], comparable=step > stage.since)

    def __call__(self, at: float, total: int) -> float:
        """Return the rate of the update that stands at step ``at`` of a run of ``total``."""
        settings, (begin, end) = self.settings, self.span
        steps = (total if end is None else end) - begin
        rate = Schedule(settings.lr, settings.min_lr_ratio, settings.warmup, steps, settings.schedule)(at - begin)
        return rate * self.plateau.share if self.plateau else rate

    def falls(self, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of a validation; return whether the rate falls by them."""
        return self.plateau is not None and self.plateau.see(metrics[self.metric.name])

    @property
    def state(self) -> dict[str, object]:
        """Return what a checkpoint holds among its numbers."""
        return {"plateau": self.plateau.state} if self.plateau else {}
