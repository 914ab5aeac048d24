"""Validation of the present weights, on a fixed piece of the validation split."""

from __future__ import annotations

import torch
from torch import nn

from kinformer.core.state import State
from kinformer.training.batch import map_fields
from kinformer.training.data_module import DataModule
from kinformer.training.distributed import Group
from kinformer.training.objective import PREDICTED, require_metrics


class Validation:
    """The validation on rows of ``data``; where it carries, the state goes on from one batch to the next.

    The rows of a batch are spread over the processes, and the result does not depend on how many there are.
    """

    def __init__(self, data: DataModule, group: Group) -> None:
        self.data, self.group = data, group

    def __call__(self, engine: nn.Module) -> dict[str, float]:
        """Return the means of the metrics over all predictions; ``engine`` is a
        wrapped ``ObjectiveModule``, left in training mode."""
        engine.eval()
        if (means := self.data.validate()) is not None:
            engine.train()
            return means
        names, device = (PREDICTED, *self.data.sums), self.group.device
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        state: State = None
        with torch.no_grad():
            for batch in self.data.validation(self.group.replica, self.group.replicas):
                rows = map_fields(self.group.stretch_of(batch), lambda field: field.to(device))
                _, metrics, after = engine(rows, state, 1.0)
                state = after if self.data.carries else None
                del after  # it may be as large as the activations
                require_metrics(metrics, names)
                for index, name in enumerate(names):
                    sums[index] += metrics[name]
        engine.train()
        predicted, *totals = self.group.sum(sums).tolist()
        return {name: total / predicted for name, total in zip(self.data.sums, totals, strict=True)}
