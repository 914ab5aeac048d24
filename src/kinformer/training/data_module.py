"""The data module of a task: the rows of a training step, the rows of a validation, and the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from kinformer.core.model import WholeModel
from kinformer.training.batch import Batch
from kinformer.training.metric import Metric


class DataModule:
    """The interface between a trainer and a task's data. Rows are a function of the step's number alone, so that
    checkpoints need not store any, unless the model itself makes them: see :meth:`begin` and :meth:`state_tensors`.

    ``sums``: those of the objective's sums that are reported, each divided by its ``predicted``; the first is
    minimised. ``metrics``: computed from their means; the first one decides which weights are the best.
    ``carries``: whether the state after a step is that before the next. ``teacher``: a model in eval mode from
    whose predictions the model also learns, or None. ``by_time``: whether a row is a text, whose batches give
    ``stretch(number, count)``, one of this many stretches of time.
    """

    sums: tuple[str, ...] = ("nats",)
    metrics: tuple[Metric, ...]
    carries: bool = False
    by_time: bool = False
    teacher: WholeModel | None = None

    @property
    def validations(self) -> int:
        """Return how many batches a validation has."""
        raise NotImplementedError

    def begin(self, model: nn.Module, state_tensors: Mapping[str, Tensor]) -> None:
        """Prepare for the first step: take the ``model`` that learns from the rows, for tasks that need it, and the
        tensors of :meth:`state_tensors` when the run was stopped (of a new run none)."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors on which the next rows depend besides the step's
        number and the weights, for a checkpoint."""
        return {}

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Return the rows of process ``rank`` of ``world``, on the CPU."""
        raise NotImplementedError

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        """Yield the process's rows of a fixed part of the validation split; all processes get as many batches."""
        raise NotImplementedError

    def validate(self) -> dict[str, float] | None:
        """Return the means of :attr:`sums` where validation acts in an environment, with the model of :meth:`begin` in
        eval mode; None where the objective scores the rows of :meth:`validation`."""
        return None

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        """Return the metrics, in order, from the means of :attr:`sums` over the split "train" or "validation"."""
        raise NotImplementedError
