"""How good the weights are now, on a fixed piece of the validation split."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from kinformer.training.distributed import Group
from kinformer.training.feeds import Feed


class Measured(NamedTuple):
    """Mean nats per prediction, and the share of correct ones where that is counted."""

    nats: float
    accuracy: float | None


class Validation:
    """Measures on the validation rows of ``feed``; with ``carry`` the state goes on from one batch to the next.

    The rows of a batch are spread over the processes, and the result does not depend on how many there are.
    """

    def __init__(self, feed: Feed, carry: bool, group: Group) -> None:
        self.feed, self.carry, self.group = feed, carry, group

    def __call__(self, engine: nn.Module) -> Measured:
        """``engine`` is a wrapped ``Step``, left in training mode."""
        engine.eval()
        device = self.group.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        state: Any = None
        with torch.no_grad():
            for batch in self.feed.validation(self.group.rank, self.group.world):
                _, metrics, after = engine(batch.map(lambda field: field.to(device)), state, 1.0)
                state = after if self.carry else None
                for index, name in enumerate(("nats", "predicted", "correct")):
                    sums[index] += metrics.get(name, 0)
        engine.train()
        nats, predicted, correct = self.group.sum(sums).tolist()
        return Measured(nats / predicted, correct / predicted if self.feed.judged else None)
