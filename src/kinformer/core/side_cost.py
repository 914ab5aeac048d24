"""Side costs of whole readings, which have no state to add them up in as chunks have (the leaf ``aux``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from kinformer.runtime.compiling import uncompiled


class SideCost(nn.Module):
    """Is told what a reading costs beside its loss, [batch], a sum over the tokens of each row; the trainer listens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.costs: dict[str, Tensor] | None = None

    @uncompiled("what is gathered is no output of the model's graph")
    def forward(self, cost: Tensor) -> None:
        if self.costs is not None:
            self.costs[self.name] = self.costs[self.name] + cost if self.name in self.costs else cost


@contextmanager
def gathering(told: Sequence[SideCost]) -> Iterator[dict[str, Tensor]]:
    """By name the costs [batch] that are told meanwhile, added up."""
    costs: dict[str, Tensor] = {}
    for each in told:
        each.costs = costs
    try:
        yield costs
    finally:
        for each in told:
            each.costs = None
