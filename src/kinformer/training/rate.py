"""The learning rate of updates: its schedule over the steps of a stage or of the run, and what plateaus left of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinformer.training.metric import Metric
from kinformer.training.plateau import Plateau
from kinformer.training.schedule import Schedule
from kinformer.training.settings import Settings
from kinformer.training.stages import Stage


class LearningRate:
    """The learning rate in ``stage``, from step ``step`` on; ``numbers`` are those of the checkpoint of that step.

    With the schedule ``plateau`` it follows ``metric``. A stage that begins a schedule begins at the full rate, and one
    that changes the model has no best validation yet.
    """

    def __init__(self, settings: Settings, stage: Stage, metric: Metric, numbers: Mapping[str, Any], step: int) -> None:
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
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds among its numbers."""
        return {"plateau": self.plateau.state} if self.plateau else {}
