"""Parts whose parameters have a price and bounds of their own, whatever the data: an L1 penalty, a range."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Penalised(nn.Module):
    """The trainer adds ``penalty()`` to the loss of a step, and calls ``constrain()`` after each update."""

    def penalty(self) -> Tensor:
        """A differentiable scalar in float32 or better, a function of the parameters alone."""
        raise NotImplementedError

    @torch.no_grad()
    def constrain(self) -> None:
        """Bring the parameters back into their bounds; called alike on all processes."""

    def measures(self) -> Mapping[str, float]:
        """What the log shows beside the penalty, by name."""
        return {}


@torch.no_grad()
def measures_of(modules: list[Penalised]) -> dict[str, float]:
    """The sum of the penalties, and the means of the measures over the modules; empty where there are none."""
    if not modules:
        return {}
    found = [module.measures() for module in modules]
    means = {name: sum(each[name] for each in found if name in each) for each in found for name in each}
    counts = {name: sum(name in each for each in found) for name in means}
    penalty = float(torch.stack([module.penalty() for module in modules]).sum())
    return {"penalty": penalty} | {name: total / counts[name] for name, total in means.items()}
