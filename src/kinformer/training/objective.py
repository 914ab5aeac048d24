"""The objective that training minimises: ``loss, metrics, state = objective(model, batch, state, progress)``.

``loss`` is a float32 scalar, the mean over the batch's predictions, with its graph. ``metrics`` are detached scalars:
``predicted``, how many predictions there are, and sums over them, such as ``nats`` and ``correct``. ``progress`` runs
from 0 to 1 in the course of training. An objective that is a module is trained with the model and saved in checkpoints;
one that uses the model's hidden states says so by ``reads_hidden = True``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from kinformer.core import state as states
from kinformer.core.learning import AuxLoss, Regularized, gather_aux_losses
from kinformer.core.model import modules_of
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.training.batch import Batch, device_of
from kinformer.training.layouts import Layouts

ObjectiveOutput = tuple[Tensor, dict[str, Tensor], State]
"""Loss, metrics and the model's state after the batch, None of a model that has none."""


PREDICTED = "predicted"
"""The metric that every objective returns: how many predictions its sums are over."""


def require_metrics(metrics: Mapping[str, object], names: Iterable[str], objective: object = None) -> None:
    """Raise a :class:`KinformerError` where ``metrics``, which ``objective`` returned, lack one of ``names``."""
    for name in names:
        if name in metrics:
            continue
        who = getattr(objective, "__name__", None) or type(objective).__name__
        place = "the objective" if objective is None else f"the objective {who}"
        meaning = "the number of predictions that its sums are over" if name == PREDICTED else "a sum of its data"
        raise KinformerError(
            f"{place} returned no metric {name!r}, {meaning}, but {', '.join(map(repr, metrics)) or 'none'}; add it to "
            "the dictionary of metrics that it returns, as a detached tensor."
        )


class Objective(Protocol):
    """The protocol of objectives, called once per forward pass with the models and batches that it is made for."""

    def __call__(self, model: Any, batch: Any, state: State, progress: float) -> ObjectiveOutput: ...


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass in ``precision``: "fp32" or "bf16-mixed"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class ObjectiveModule(nn.Module):
    """A model and its objective as one module, so that the engine sees every call of the model by the objective.

    Auxiliary losses (sums over positions, one per row), in the state or gathered from an encoder's layers
    (``core.learning``), are added to the loss as means over positions; in training, so are the penalties of regularized
    parts. ``replicas``: the processes whose gradients are averaged where no engine does it, None where one does.
    """

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
        absorbed, state = ({}, None) if state is None else states.pop_aux(state)
        for costs in (read, absorbed):
            for name, cost in costs.items():
                loss = loss + cost.float().sum() / batch.size
                metrics = metrics | {name: metrics.get(name, 0) + cost.detach().sum()}
        return loss, metrics, state
