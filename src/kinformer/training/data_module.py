"""The rows of a task: those that a step learns from, those that validate, and the figures that come of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from kinformer.training.metric import Metric


class DataModule:
    """What a trainer asks of a task's data. Rows are a function of the step's number alone, so that nothing is to be
    kept, unless the model itself makes them: see :meth:`begin` and :meth:`kept`.

    ``sums``: those of the objective's sums that are reported, each divided by its ``predicted``; the first is
    minimised. ``metrics``: computed from their means; the first one decides which weights are the best.
    ``carries``: whether the state after a step is that before the next. ``teacher``: a model in eval mode whose
    predictions are learnt too, or None.
    """

    sums: tuple[str, ...] = ("nats",)
    metrics: tuple[Metric, ...]
    carries: bool = False
    teacher: Any = None

    @property
    def validations(self) -> int:
        """Batches of a validation."""
        raise NotImplementedError

    def begin(self, model: Any, state_tensors: Mapping[str, Tensor]) -> None:
        """Before the first step: the ``model`` that learns from the rows, for those who ask it for them, and what
        :meth:`kept` gave when the run that goes on was stopped (of a new one nothing)."""

    def state_tensors(self) -> dict[str, Tensor]:
        """What the next rows depend on besides the step's number and the weights, for a checkpoint."""
        return {}

    def batch(self, step: int, rank: int, world: int) -> Any:
        """The rows of process ``rank`` of ``world``, on the CPU."""
        raise NotImplementedError

    def validation(self, rank: int, world: int) -> Iterator[Any]:
        """The process's rows of a fixed part of the validation split, as many batches for all processes."""
        raise NotImplementedError

    def validate(self) -> dict[str, float] | None:
        """The means of :attr:`sums` where validating is acting, with the model of :meth:`begin` in eval mode; None
        where the objective scores the rows of :meth:`validation`."""
        return None

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        """The metrics, in order, from the means of :attr:`sums` over the split "train" or "validation"."""
        raise NotImplementedError
