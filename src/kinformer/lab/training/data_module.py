"""The data module of a task: the rows of a training step, the rows of a validation, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from kinformer.core.learning import AuxLoss, Regularized, gather_aux_losses
from kinformer.core.model import WholeModel, modules_of
from kinformer.core.state import State, map_tensors, pop_aux, rebuilt
from kinformer.lab.training.layouts import Layouts
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError

# Batches: a task's NamedTuple of tensors [batch, ...], states or None, with one row per example.


class Batch(Protocol):
    """A batch, as a NamedTuple. Its fields are tensors [batch, ...], states or None; the first field other than None is
    a tensor. ``size`` is the number of positions (tokens, frames), padding included: the unit of speed."""

    @property
    def size(self) -> int: ...

    def __iter__(self) -> Iterator[State]: ...


B = TypeVar("B", bound=Batch)


def map_fields(batch: B, change: Callable[[Tensor], Tensor]) -> B:
    """Apply ``change`` to every tensor of a batch."""
    return rebuilt(batch, [None if field is None else map_tensors(change, field) for field in batch])


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return next(len(field) for field in batch if field is not None)


def take_rows(batch: B, part: slice) -> B:
    """Return the rows ``part`` of a batch."""
    return map_fields(batch, lambda field: field[part])


def device_of(batch: Batch) -> torch.device:
    """Return the device of a batch's tensors."""
    return next(field.device for field in batch if field is not None)


def stretch_of_rows(tokens: Tensor, valid: Tensor | None, number: int, count: int) -> tuple[Tensor, Tensor | None]:
    """Return stretch ``number`` of ``count`` of ``tokens`` and ``valid`` [batch, time], which are padded to a multiple
    of ``count``; valid tokens are the first of their rows."""
    size = -(-tokens.shape[1] // count)
    lacking = size * count - tokens.shape[1]
    if lacking and valid is None:
        valid = torch.ones_like(tokens, dtype=torch.bool)
    part = slice(number * size, (number + 1) * size)
    stretch = functional.pad(tokens, (0, lacking))[:, part]
    return stretch, None if valid is None else functional.pad(valid, (0, lacking))[:, part]


class DataModule:
    """The interface between a trainer and a task's data.

    Rows depend on the step's number alone, so checkpoints need not store rows. Rows that the model itself makes are
    the exception: see :meth:`begin` and :meth:`state_tensors`.

    ``sums``: the names of the objective's sums to report, each divided by its ``predicted``; the first is minimised.
    ``metrics``: computed from the means of the sums; the first metric decides which weights are the best.
    ``carries``: whether a step begins with the state after the step before. ``teacher``: a model in eval mode, from
    whose predictions the model also learns, or None. ``by_time``: whether a row is a text; its batches then have
    ``stretch(number, count)``, which returns stretch ``number`` of ``count`` stretches of time.
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
        """Return the tensors on which the next rows depend besides the step and the weights, for a checkpoint."""
        return {}

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Return the rows of process ``rank`` of ``world``, on the CPU."""
        raise NotImplementedError

    def validation(self, rank: int, world: int) -> Iterator[Batch]:
        """Yield the process's rows of a fixed part of the validation split; all processes get as many batches."""
        raise NotImplementedError

    def validate(self) -> dict[str, float] | None:
        """Return the means of :attr:`sums` where validation acts in an environment, with the model of :meth:`begin`;
        None where the objective scores the rows of :meth:`validation`."""
        return None

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        """Return the metrics, in order, from the means of :attr:`sums` over the split "train" or "validation"."""
        raise NotImplementedError

    def baselines(self) -> dict[str, float]:
        """Return the first metric of quick simple rules on the rows of :meth:`validation`, by the task's ``rivals``."""
        return {}


# The objective that training minimises: ``loss, metrics, state = objective(model, batch, state, progress)``.
#
# ``loss`` is a float32 scalar, the mean over the batch's predictions, with its graph. ``metrics`` are detached
# scalars: ``predicted``, the number of predictions, and sums over the predictions, such as ``nats`` and ``correct``.
# ``progress`` runs from 0 to 1 in the course of training. A module as objective is trained with the model and saved in
# checkpoints. An objective that uses the model's hidden states sets ``reads_hidden = True``.

ObjectiveOutput = tuple[Tensor, dict[str, Tensor], State]
"""Loss, metrics and the model's state after the batch; None for a model without a state."""

PREDICTED = "predicted"
"""The metric that every objective returns: how many predictions its sums are over."""


def require_metrics(metrics: Mapping[str, object], names: Iterable[str], objective: object = None) -> None:
    """Raise a :class:`KinformerError` where ``metrics``, which ``objective`` returned, lack one of ``names``."""
    if (name := next((name for name in names if name not in metrics), None)) is not None:
        who = getattr(objective, "__name__", None) or type(objective).__name__
        place = "the objective" if objective is None else f"the objective {who}"
        meaning = "the number of predictions that its sums are over" if name == PREDICTED else "a sum of its data"
        raise KinformerError(
            f"{place} returned no metric {name!r}, {meaning}, but {', '.join(map(repr, metrics)) or 'none'}; add it to "
            "the dictionary of metrics that it returns, as a detached tensor."
        )


class Objective(Protocol):
    """The protocol of objectives, called once per forward pass with the model and a batch of the task."""

    def __call__(self, model: Any, batch: Any, state: State, progress: float) -> ObjectiveOutput: ...


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass in ``precision``: "fp32" or "bf16-mixed"."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16)


class ObjectiveModule(nn.Module):
    """A model and its objective as one module, so that the engine sees every call of the model by the objective.
    Auxiliary losses (sums over positions, one per row), in the state or gathered from an encoder's layers
    (``core.learning``), are added to the loss as means over positions; in training, so are the penalties of regularized
    parts. ``replicas``: the processes whose gradients are averaged here, None where an engine averages them."""

    replicas: distributed.ProcessGroup | None = None

    def __init__(self, model: nn.Module, objective: Objective, precision: str) -> None:
        super().__init__()
        self.model, self.objective, self.precision = model, objective, precision
        self.layouts = Layouts()
        self.regularized, self.with_aux_loss = modules_of(model, Regularized), modules_of(model, AuxLoss)

    @property
    def extras(self) -> nn.Module:
        """Return the modules trained beside the model: the objective if it has weights, or none."""
        return self.objective if isinstance(self.objective, nn.Module) else nn.Module()

    def forward(self, batch: Batch, state: State, progress: float) -> ObjectiveOutput:
        with autocast(device_of(batch), self.precision), gather_aux_losses(self.with_aux_loss) as read:
            loss, metrics, state = self.objective(self.model, batch, state, progress)
        require_metrics(metrics, (PREDICTED,), self.objective)
        for module in self.regularized if self.training else ():
            loss = loss + module.penalty()
        absorbed, state = ({}, None) if state is None else pop_aux(state)
        for costs in (read, absorbed):
            for name, cost in costs.items():
                loss = loss + cost.float().sum() / batch.size
                metrics = metrics | {name: metrics.get(name, 0) + cost.detach().sum()}
        return loss, metrics, state
